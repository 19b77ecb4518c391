"""Trace events: a request's way through the stages.

Owns: the form of an event, the memory of the last requests of one stage, the level.
Does not know: the bus; events go to a sink. Durations are this stage's own: `elapsed_ms` counts from when this stage
took the request, so clocks of two hosts are never subtracted. Prompts and answers are never part of an event.
"""

from __future__ import annotations

import enum
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

MAX_REMEMBERED_REQUESTS = 1000
MAX_REMEMBERED_EVENTS = 64  # per request; later ones are published but not remembered


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


class TraceRecorder:
    """Makes events of one stage, hands them to the sink and remembers the last requests."""

    def __init__(self, stage: str, instance: str, level: TraceLevel, sink: TraceSink) -> None:
        self._stage = stage
        self._instance = instance
        self._sink = sink
        self._began: OrderedDict[str, float] = OrderedDict()
        self._events: dict[str, list[TraceEvent]] = {}
        self.level = level

    @property
    def tells_tokens(self) -> bool:
        """Whether text deltas are to be recorded."""
        return self.level is TraceLevel.TOKENS

    def begin(self, uid: str) -> None:
        """This stage takes the request now (again: the first time counts)."""
        if self.level is TraceLevel.OFF or uid in self._began:
            return
        self._began[uid] = time.monotonic()
        self._events[uid] = []
        if len(self._began) > MAX_REMEMBERED_REQUESTS:
            oldest, _ = self._began.popitem(last=False)
            del self._events[oldest]

    def record(self, uid: str, event: str, **data: Any) -> None:
        """Records one event of a request."""
        if self.level is TraceLevel.OFF:
            return
        self.begin(uid)
        elapsed_s = time.monotonic() - self._began[uid]
        made = TraceEvent(
            uid=uid,
            stage=self._stage,
            instance=self._instance,
            event=event,
            at=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            elapsed_ms=round(elapsed_s * 1e3, 3),
            data=data,
        )
        remembered = self._events[uid]
        if len(remembered) < MAX_REMEMBERED_EVENTS:
            remembered.append(made)
        self._sink(made)

    def events_of(self, uid: str) -> list[TraceEvent]:
        """What is remembered of one request."""
        return list(self._events.get(uid, ()))

    def latest(self, limit: int) -> list[TraceEvent]:
        """The events of the latest `limit` requests, oldest request first."""
        uids = list(self._began)[-limit:]
        return [event for uid in uids for event in self._events[uid]]
