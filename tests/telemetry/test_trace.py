"""What a stage remembers of requests, and the times of it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from busllm.telemetry.trace import (
    ENDS,
    MAX_FIRST_EVENTS,
    MAX_LATEST_EVENTS,
    TraceEvent,
    TraceLevel,
    TraceRecorder,
)

UID = "u" * 20


class Told:
    """A recorder and everything that it told."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self.recorder = TraceRecorder("scheduler", "scheduler-0-aaaaaaaa", TraceLevel.REQUESTS, self.events.append)


@pytest.fixture
def told() -> Told:
    return Told()


def test_an_event_is_timed_from_when_the_request_was_taken(told: Told) -> None:
    began_s = time.monotonic()
    told.recorder.begin(UID)
    told.recorder.record(UID, "admitted", choice=0)
    (event,) = told.events
    assert 0.0 <= event.elapsed_ms <= (time.monotonic() - began_s) * 1e3
    assert (event.uid, event.event, event.data) == (UID, "admitted", {"choice": 0})


def test_an_event_that_is_heard_of_late_keeps_the_time_at_which_it_happened(told: Told) -> None:
    taken_s = time.monotonic() - 60.0
    told.recorder.begin(UID, at_s=taken_s)
    told.recorder.record(UID, "admitted", at_s=taken_s + 10.0)
    told.recorder.record(UID, "prefilled", at_s=taken_s + 30.0)
    admitted, prefilled = told.events
    assert (admitted.elapsed_ms, prefilled.elapsed_ms) == (pytest.approx(10_000), pytest.approx(30_000))
    apart = datetime.fromisoformat(prefilled.at) - datetime.fromisoformat(admitted.at)
    assert apart.total_seconds() == pytest.approx(20.0, abs=0.1)
    ago = datetime.now(UTC) - datetime.fromisoformat(prefilled.at)
    assert abs(ago - timedelta(seconds=30)) < timedelta(seconds=5)


def test_a_request_that_was_not_taken_begins_with_its_first_event(told: Told) -> None:
    happened_s = time.monotonic() - 5.0
    told.recorder.record(UID, "queued", at_s=happened_s)
    told.recorder.record(UID, "admitted", at_s=happened_s + 1.0)
    assert [event.elapsed_ms for event in told.events] == [0.0, pytest.approx(1_000)]


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_request_is_remembered_however_much_came_before(told: Told, end: str) -> None:
    for number in range(1000):
        told.recorder.record(UID, "delta", number=number)
    told.recorder.record(UID, end)
    assert len(told.events) == 1001, "everything is published"
    remembered = told.recorder.events_of(UID)
    numbers = [event.data["number"] for event in remembered[:-1]]
    assert numbers == [*range(MAX_FIRST_EVENTS), *range(1000 - MAX_LATEST_EVENTS, 1000)]
    assert remembered[-1].event == end
    assert told.recorder.latest(1) == remembered


def test_the_end_of_every_choice_is_remembered(told: Told) -> None:
    for event in ("queued", "admitted", "prefilled", "first_token", "finished"):
        for choice in range(128):
            told.recorder.record(UID, event, choice=choice)
    ends = [event.data["choice"] for event in told.recorder.events_of(UID) if event.event == "finished"]
    assert ends == list(range(128))
