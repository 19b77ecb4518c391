"""Time as a thing that is passed in, so that tests wait on events and never on time.

Owns: the protocol `Clock`, the system's clock and the one frozen table of durations, `Timings`.
"""

from __future__ import annotations

import time
from typing import Protocol

import anyio
import msgspec


class Clock(Protocol):
    """Where an actor gets its time from."""

    def monotonic(self) -> float:
        """Seconds that only grow; comparable within one process."""
        ...

    def time(self) -> float:
        """Seconds since the epoch."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        ...


class SystemClock:
    """The system's clock."""

    def monotonic(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def time(self) -> float:
        """See `Clock`."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        await anyio.sleep(seconds)


class Timings(msgspec.Struct, frozen=True):
    """Every duration and bound of the life of actors and requests, in one table.

    Attributes:
        heartbeat_s: pause between two announcements.
        suspect_s: silent for this long = suspect: no new work, its requests go on elsewhere if somebody can take them.
        gone_s: silent for this long = gone.
        taken_s: a stage that was sent a request says `Taken` within this time.
        silence_s: a request silent for this long is asked about.
        strike_s: pause before a doubtful answer is checked again.
        probe_timeout_s: how long an answer to a probe may take.
        tick_s: how often an owner looks at its requests.
        settle_s: after a bus gap nobody is judged for this long (two heartbeats).
        orphan_check_s: how often a stage asks the owners of what it holds whether they still wait for it.
        retry_pause_s: pause before a request goes on once more after several tries in a row without a new token,
            doubled each time up to two seconds.
        first_stage_s: a request that no stage has taken waits this long for one to appear.
        resume_deadline_s: a request in flight waits this long for somebody to take it over.
        max_holders_lost: a request that loses more holders in a row, without a new token, is given up; one that was
            only silent and is heard again is not lost.
        stall_base_s, stall_factor: an engine with running sequences and no step for base + factor * slowest step so
            far counts as stalled.
        restart_backoff_s, restart_backoff_max_s, restart_limit, restart_window_s: restarts of a failed actor in place.
        drain_timeout_s: how long a drain waits for what runs.
        hurried_drain_s: how long it still waits once it is told to hurry.
    """

    heartbeat_s: float = 0.5
    suspect_s: float = 2.0
    gone_s: float = 6.0
    taken_s: float = 1.0
    silence_s: float = 1.0
    strike_s: float = 0.3
    probe_timeout_s: float = 1.0
    tick_s: float = 0.1
    settle_s: float = 1.0
    orphan_check_s: float = 2.0
    retry_pause_s: float = 0.1
    first_stage_s: float = 1.0
    resume_deadline_s: float = 60.0
    max_holders_lost: int = 2
    stall_base_s: float = 30.0
    stall_factor: float = 5.0
    restart_backoff_s: float = 0.1
    restart_backoff_max_s: float = 2.0
    restart_limit: int = 5
    restart_window_s: float = 60.0
    drain_timeout_s: float = 30.0
    hurried_drain_s: float = 0.5
