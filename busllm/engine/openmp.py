"""OpenMP's waiting threads.

Owns: the one setting that must be made before torch is imported.
Does not know: how many threads there are.
"""

from __future__ import annotations

import os

SPIN_COUNT = "1000"


def calm_openmp() -> None:
    """Lets waiting OpenMP threads give up their core soon.

    Between the parallel parts of a step GNU OpenMP's threads spin, by default for so long that a thread which has lost
    its core to another process holds up all others: on two cores shared with the HTTP process a decode step went from
    30 ms to 170. Called before torch is imported; a value in the environment wins.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
