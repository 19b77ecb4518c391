"""Memory that the system gives on its first use, used before anybody waits for it.

Owns: the asking for it, a little at a time, and no more than leaves the host some.
Does not know: what lies there (`engine/kv_cache.py`), when there is time (`stages/scheduler/engine_thread.py`).

The system fills memory with zeros when it is first written to, 2 MB at a time if it may. That takes 0.1 ms, but 5 ms in
a virtual machine whose host has to find the memory, too; and every few tokens a step would wait for it.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from busllm.engine.free_memory import SPARED_BYTES, free_memory_bytes
from busllm.errors import EngineError
from busllm.telemetry.logging import get_logger

_AT_ONCE = 2 * 2**20  # bytes; as much as the system gives at once
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: makes memory ready for writing and leaves what is there
_LEFT_BYTES = 2 * SPARED_BYTES  # to others on the host: where there is less, memory is taken as it is needed


class Prefault:
    """Asks the system for the memory of a process.

    Args:
        blocks: address and bytes of each block, which the caller keeps; each is used from its beginning, all equally
            fast.
        mapped_bytes: of files that must stay in memory, though the kernel counts them as available.
    """

    def __init__(self, blocks: tuple[tuple[int, int], ...], mapped_bytes: int = 0) -> None:
        self._blocks = blocks
        self._left_bytes = _LEFT_BYTES + mapped_bytes
        self._ready = [0] * len(blocks)  # bytes
        self._advise = ctypes.CDLL(None, use_errno=True).madvise
        self._advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def advance(self) -> bool:
        """Asks for 2 MB more; False when there is no more to ask for, the system cannot do it or has too little."""
        left = [index for index, (_, size) in enumerate(self._blocks) if self._ready[index] < size]
        if not left:
            return False
        index = min(left, key=lambda each: self._ready[each] / self._blocks[each][1])
        address, size = self._blocks[index]
        begin, last = address + self._ready[index], address + size
        end = min((begin // _AT_ONCE + 1) * _AT_ONCE, last)
        reason = self._ask(begin // mmap.PAGESIZE * mmap.PAGESIZE, end)
        if reason is not None:
            get_logger("busllm.engine").info("kv_memory_taken_as_needed", reason=reason)
            self._blocks, self._ready = (), []
            return False
        self._ready[index] = end - address
        return len(left) > 1 or end < last

    def _ask(self, begin: int, end: int) -> str | None:
        """Why not, if the memory could not be had."""
        try:
            free_bytes = free_memory_bytes()
        except EngineError as error:
            return str(error)
        if free_bytes < self._left_bytes:
            return f"the host has {free_bytes} bytes left"
        if self._advise(begin, end - begin, _POPULATE_WRITE) != 0:
            return os.strerror(ctypes.get_errno())
        return None
