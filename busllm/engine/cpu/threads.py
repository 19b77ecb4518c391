"""How many cores a step uses.

Owns: the agreement between torch's number of threads and numba's.
"""

from __future__ import annotations

import numba
import torch


def num_threads() -> int:
    """What torch uses (`OMP_NUM_THREADS`, else every core), if numba has so many."""
    return min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))
