"""Trace events: a request's way through the stages.

Owns: the form of an event, the memory of the last requests of one stage, the level.
Does not know: the bus; events go to a sink. Durations are this stage's own: `elapsed_ms` counts from when this stage
took the request, so clocks of two hosts are never subtracted. Prompts and answers are never part of an event.
"""

from __future__ import annotations

import enum
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

MAX_REMEMBERED_REQUESTS = 1000
# Of each request. What falls between the first events and the latest is published but not remembered.
MAX_FIRST_EVENTS = 48
MAX_LATEST_EVENTS = 16
MAX_ENDS = 1024  # one for each choice; more choices no request has
ENDS = ("finished", "failed", "aborted")


class TraceLevel(enum.Enum):
    """How much is told. `tokens` adds every text delta's token ids."""

    OFF = "off"
    REQUESTS = "requests"
    TOKENS = "tokens"


class TraceEvent(msgspec.Struct, frozen=True):
    """One event, as it travels (JSON).

    Attributes:
        at: RFC 3339 in UTC, by this host's clock.
        elapsed_ms: since this stage took the request.
        data: numbers and short words.
    """

    uid: str
    stage: str
    instance: str
    event: str
    at: str
    elapsed_ms: float
    data: dict[str, Any]


TraceSink = Callable[[TraceEvent], None]


class _Remembered:
    """What is kept of one request: its first events, its latest ones, and every end, however many come between."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._first: list[tuple[int, TraceEvent]] = []
        self._latest: deque[tuple[int, TraceEvent]] = deque(maxlen=MAX_LATEST_EVENTS)
        self._ends: deque[tuple[int, TraceEvent]] = deque(maxlen=MAX_ENDS)

    def add(self, event: TraceEvent) -> None:
        numbered = (self._num_seen, event)
        self._num_seen += 1
        if len(self._first) < MAX_FIRST_EVENTS:
            self._first.append(numbered)
        elif event.event in ENDS:
            self._ends.append(numbered)
        else:
            self._latest.append(numbered)

    def in_order(self) -> list[TraceEvent]:
        numbered = sorted((*self._first, *self._latest, *self._ends), key=lambda entry: entry[0])
        return [event for _, event in numbered]


class TraceRecorder:
    """Makes events of one stage, hands them to the sink and remembers the last requests."""

    def __init__(self, stage: str, instance: str, level: TraceLevel, sink: TraceSink) -> None:
        self._stage = stage
        self._instance = instance
        self._sink = sink
        self._began: OrderedDict[str, float] = OrderedDict()
        self._events: dict[str, _Remembered] = {}
        self.level = level

    @property
    def tells_tokens(self) -> bool:
        """Whether text deltas are to be recorded."""
        return self.level is TraceLevel.TOKENS

    def begin(self, uid: str, *, at_s: float | None = None) -> None:
        """This stage takes the request now, or took it `at_s` (again: the first time counts)."""
        if self.level is TraceLevel.OFF or uid in self._began:
            return
        self._began[uid] = time.monotonic() if at_s is None else at_s
        self._events[uid] = _Remembered()
        if len(self._began) > MAX_REMEMBERED_REQUESTS:
            oldest, _ = self._began.popitem(last=False)
            del self._events[oldest]

    def record(self, uid: str, event: str, *, at_s: float | None = None, **data: Any) -> None:
        """Records one event of a request.

        Args:
            uid: the request.
            event: what happened.
            at_s: `time.monotonic()` when it did, for what is heard of later than it happened; None = now.
            data: numbers and short words.
        """
        if self.level is TraceLevel.OFF:
            return
        now_s = time.monotonic()
        happened_s = now_s if at_s is None else at_s
        self.begin(uid, at_s=happened_s)
        elapsed_s = max(0.0, happened_s - self._began[uid])
        made = TraceEvent(
            uid=uid,
            stage=self._stage,
            instance=self._instance,
            event=event,
            at=_wall_clock(now_s - happened_s),
            elapsed_ms=round(elapsed_s * 1e3, 3),
            data=data,
        )
        self._events[uid].add(made)
        self._sink(made)

    def events_of(self, uid: str) -> list[TraceEvent]:
        """What is remembered of one request, in the order in which it was recorded."""
        remembered = self._events.get(uid)
        return [] if remembered is None else remembered.in_order()

    def latest(self, limit: int) -> list[TraceEvent]:
        """The events of the latest `limit` requests, oldest request first."""
        uids = list(self._began)[-limit:]
        return [event for uid in uids for event in self._events[uid].in_order()]


def _wall_clock(ago_s: float) -> str:
    """RFC 3339 in UTC, milliseconds, of a moment so long ago."""
    moment = datetime.now(UTC) - timedelta(seconds=ago_s)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
