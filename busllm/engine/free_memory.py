"""How much memory a KV cache may take.

Owns: the question to the device or the operating system.
Does not know: what share of it is used.
"""

from __future__ import annotations

import os

import torch


def free_memory_bytes() -> int:
    """Free bytes of the CUDA device in use, or of the host's memory."""
    if torch.cuda.is_available():
        free_bytes, _ = torch.cuda.mem_get_info()
        return int(free_bytes)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
