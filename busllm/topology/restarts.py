"""When something that ended is started again, and when it is given up.

Owns: the growing pause and the limit, as pure decisions over times that are passed in.
Does not know: what ends (`supervise.py`, `bus_keeper.py`).
"""

from __future__ import annotations

from collections import deque

import msgspec


class RestartTimings(msgspec.Struct, frozen=True):
    """Bounds of restarting.

    Attributes:
        first_pause_s: before the first restart; doubles with each further one of the last `window_s`.
        max_pause_s: the longest pause.
        limit: so many ends within `window_s` are followed by a restart; one more is not.
        window_s: how long an end counts.
    """

    first_pause_s: float = 0.2
    max_pause_s: float = 5.0
    limit: int = 5
    window_s: float = 60.0


class RestartPolicy:
    """Counts the ends of one thing.

    Args:
        timings: the bounds.
    """

    def __init__(self, timings: RestartTimings) -> None:
        self._timings = timings
        self._ends_s: deque[float] = deque()

    def pause_s(self, now_s: float) -> float | None:
        """Notes an end at `now_s` (monotonic) and says how long to wait before the restart; None = give up."""
        self._ends_s.append(now_s)
        while self._ends_s[0] < now_s - self._timings.window_s:
            self._ends_s.popleft()
        if len(self._ends_s) > self._timings.limit:
            return None
        doublings = len(self._ends_s) - 1
        return min(self._timings.first_pause_s * 2.0**doublings, self._timings.max_pause_s)
