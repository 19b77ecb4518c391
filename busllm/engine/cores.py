"""A core for each of the threads that compute.

Owns: which thread of an engine runs where, and the claim by which the processes of a host settle who may bind threads.
Does not know: what is computed.
Next on the path: `engine/cpu/threads.py`, how many of them a step gets.

Beside a busy HTTP process the kernel puts two of an engine's threads on one core for a time slice now and then, and
each waits for the other at the end of every short piece. Bound to cores of their own they cannot meet. Whoever else
wants to run has the same cores as before: the kernel moves them, not us.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from busllm.telemetry.logging import get_logger

_CLAIM = "\0busllm.processor"  # with its number a socket's name on this host, free again when its process has ended
_PROCESSORS = Path("/sys/devices/system/cpu")


class BoundThreads:
    """Threads with cores of their own. Other processes may bind theirs to these when this is closed, or gone."""

    def __init__(self, claims: Sequence[socket.socket]) -> None:
        self._claims = claims

    def close(self) -> None:
        """Gives the claims back; the threads stay where they are."""
        for claim in self._claims:
            claim.close()


def bind_threads(thread_ids: Sequence[int]) -> BoundThreads | None:
    """Binds the threads that compute, if there is a core for each and nobody else on this host has bound any to it.

    A thread that is started by a bound one would be bound like it: see `unbind_thread`.

    Args:
        thread_ids: of the kernel, of this process; not its first thread.

    Returns:
        None = they are left alone; so they are where the environment has `OMP_PROC_BIND`, whatever it says.
    """
    if len(thread_ids) < 2 or not hasattr(os, "sched_setaffinity"):
        return None
    log = get_logger("busllm.engine")
    if "OMP_PROC_BIND" in os.environ:
        log.info("threads_not_bound", why="OMP_PROC_BIND is set")
        return None
    bound = BoundThreads(claims := [])
    try:  # a sandbox may forbid any of it; who was bound by then has a core
        cores = _cores(os.sched_getaffinity(0), len(thread_ids))
        if len(cores) != len(thread_ids):
            log.info("threads_not_bound", why=f"there are {len(thread_ids)} threads and {len(cores)} cores")
            return None
        for processor in sorted(set().union(*cores)):
            claims.append(socket.socket(socket.AF_UNIX))
            claims[-1].bind(f"{_CLAIM}.{processor}")
        for thread_id, core in zip(thread_ids, cores, strict=True):
            os.sched_setaffinity(thread_id, core)
    except OSError as error:
        bound.close()
        is_taken = error.errno == errno.EADDRINUSE
        log.info("threads_not_bound", why="another engine on this host has bound its own" if is_taken else str(error))
        return None
    log.info("threads_bound", cores=[sorted(core) for core in cores])
    return bound


def unbind_thread() -> None:
    """Lets this thread run where its process may; for threads that a bound one starts."""
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))  # of the first thread, which is never bound


def _cores(usable: Collection[int], num_threads: int) -> Sequence[frozenset[int]]:
    """The processors of each core that may be used; each by itself where that makes as many as there are threads."""
    if len(usable) == num_threads:
        return [frozenset({processor}) for processor in sorted(usable)]
    cores: dict[int, frozenset[int]] = {}
    for processor in sorted(usable):
        siblings = _siblings(processor) & frozenset(usable)
        cores.setdefault(min(siblings), siblings)
    return list(cores.values())


def _siblings(processor: int) -> frozenset[int]:
    """The processors of its core, which the kernel writes as `0,64` or `0-1`; itself where it says nothing."""
    found = {processor}
    with suppress(OSError, ValueError):
        for part in (_PROCESSORS / f"cpu{processor}/topology/thread_siblings_list").read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
