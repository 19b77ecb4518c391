"""How often an unreachable server is tried, and how often that is logged.

Owns: the growing pause with jitter, and the growing interval between log lines.
Does not know: what is tried.
Next on the path: `bus/nats.py`, which sleeps and logs as told here.
"""

from __future__ import annotations

import random
import time

import msgspec


class RetryTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between attempts and between log lines; both double from the first value to the second."""

    first_pause_s: float = 0.1
    max_pause_s: float = 2.0
    first_log_interval_s: float = 1.0
    max_log_interval_s: float = 60.0


class RetryPace:
    """Pauses of one run of attempts. The half of every pause is random, so that many clients of a returning server
    spread out.

    Args:
        timings: the limits.
    """

    def __init__(self, timings: RetryTimings) -> None:
        self._timings = timings
        self._pause_s = timings.first_pause_s
        self._log_interval_s = timings.first_log_interval_s
        self._next_log_at: float | None = None

    def next_pause_s(self) -> float:
        """Seconds to wait before the next attempt."""
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, self._timings.max_pause_s)
        return pause_s

    def is_time_to_log(self) -> bool:
        """Whether this failure is to be logged: the first one, then at growing intervals."""
        now = time.monotonic()
        if self._next_log_at is None:
            self._next_log_at = now + self._log_interval_s
            return True
        if now < self._next_log_at:
            return False
        self._log_interval_s = min(2 * self._log_interval_s, self._timings.max_log_interval_s)
        self._next_log_at = now + self._log_interval_s
        return True

    def reset(self) -> None:
        """Starts again with the shortest pause, after a connection that held."""
        self._pause_s = self._timings.first_pause_s
        self._log_interval_s = self._timings.first_log_interval_s
        self._next_log_at = None
