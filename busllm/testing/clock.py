"""A clock that stands still until a test moves it.

Owns: the waking of sleepers in the order of their times, and the wait for what follows from that.
Does not know: what is timed.
"""

from __future__ import annotations

import heapq
import itertools

import anyio
import anyio.lowlevel

EPOCH_S = 1_700_000_000.0
_TURNS = 50  # of the event loop: a message between two actors on a memory bus takes about three


async def settle() -> None:
    """Lets everything happen on this event loop that can happen without time, threads or sockets."""
    for _ in range(_TURNS):
        await anyio.lowlevel.checkpoint()


class ManualClock:
    """Implements `busllm.actors.clock.Clock`; `advance` moves it.

    Args:
        at_s: what `monotonic` says at the beginning.
    """

    def __init__(self, at_s: float = 0.0) -> None:
        self._now_s = at_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, anyio.Event]] = []

    def monotonic(self) -> float:
        """See `Clock`."""
        return self._now_s

    def time(self) -> float:
        """See `Clock`."""
        return EPOCH_S + self._now_s

    async def sleep(self, seconds: float) -> None:
        """Waits until the clock was moved that far."""
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
            return
        woken = anyio.Event()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._order), woken))
        await woken.wait()

    async def advance(self, seconds: float) -> None:
        """Moves the clock; each sleeper on the way wakes at its own time, and what follows from that happens first."""
        await settle()
        until_s = self._now_s + seconds
        while self._sleepers and self._sleepers[0][0] <= until_s:
            self._now_s, _, woken = heapq.heappop(self._sleepers)
            woken.set()
            await settle()
        self._now_s = until_s
