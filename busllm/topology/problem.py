"""One mistake in a topology file.

Owns: `Problem`.
Does not know: which mistakes there are (`checks.py`, `rank_checks.py`), files and lines (`read.py`).
"""

from __future__ import annotations

import msgspec

from busllm.topology.toml_lines import KeyPath


class Problem(msgspec.Struct, frozen=True):
    """One mistake.

    Attributes:
        path: the key.
        message: what is wrong and what to do.
        suggestion: the nearest right value.
    """

    path: KeyPath
    message: str
    suggestion: str | None = None
