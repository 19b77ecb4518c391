"""Memory that the system gives on its first use, used before anybody waits for it.

Owns: the asking for it, a little at a time.
Does not know: what lies there (`engine/kv_cache.py`), when there is time (`stages/scheduler/engine_thread.py`).

The system fills memory with zeros when it is first written to, 2 MB at a time if it may. That takes 0.1 ms, but 5 ms in
a virtual machine whose host has to find the memory, too; and every few tokens a step would wait for it.
"""

from __future__ import annotations

import ctypes
import mmap

_AT_ONCE = 2 * 2**20  # bytes; as much as the system gives at once
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: makes memory ready for writing and leaves what is there


class FirstUse:
    """Asks the system for the memory of a process.

    Args:
        blocks: address and bytes of each block; each is used from its beginning, all equally fast.
    """

    def __init__(self, blocks: tuple[tuple[int, int], ...]) -> None:
        self._blocks = blocks
        self._ready = [0] * len(blocks)  # bytes
        self._advise = ctypes.CDLL(None, use_errno=True).madvise
        self._advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def some(self) -> bool:
        """Asks for 2 MB more; False when there is no more to ask for, or the system cannot do it."""
        left = [index for index, (_, size) in enumerate(self._blocks) if self._ready[index] < size]
        if not left:
            return False
        index = min(left, key=lambda each: self._ready[each] / self._blocks[each][1])
        address, size = self._blocks[index]
        begin, last = address + self._ready[index], address + size
        end = min((begin // _AT_ONCE + 1) * _AT_ONCE, last)
        self._ready[index] = end - address
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if self._advise(first, end - first, _POPULATE_WRITE) != 0:
            self._blocks, self._ready = (), []
            return False
        return len(left) > 1 or end < last
