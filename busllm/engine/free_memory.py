"""How much of the host's memory a KV cache may take.

Owns: the question to the operating system.
Does not know: what share of it is used, and devices (`engine/memory_profile.py`).
"""

from __future__ import annotations

import os


def free_memory_bytes(num_sharers: int = 1) -> int:
    """Free bytes of the host's memory.

    Args:
        num_sharers: how many processes fill it alike, this one included.
    """
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_sharers
