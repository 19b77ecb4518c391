"""The times of the scheduler's trace events: the engine's own, however busy the event loop or a step is."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.null import NullRunner
from busllm.messages.codec import pack_ids
from busllm.messages.to_scheduler import ChoiceStart, Generate
from busllm.sampling import SamplingParams
from busllm.stages.scheduler.stage import SchedulerStage
from tests.stages.wire import DETOKENIZER, FRONTEND, SUBJECTS, Wire, running

pytestmark = pytest.mark.anyio

STEP_S = 0.1


def stage() -> SchedulerStage:
    config = EngineConfig(num_pages=64, max_running=8, max_context_tokens=800)
    return SchedulerStage(lambda: Engine(NullRunner(step_time_s=STEP_S), config))


def send(wire: Wire, uid: str, max_tokens: int) -> None:
    message = Generate(
        uid, 1, FRONTEND, pack_ids([1, 2]), (ChoiceStart(0),), SamplingParams(max_tokens=max_tokens), seed=1
    )
    wire.send(SUBJECTS.generate(wire.actor.instance, uid), message)


def elapsed_ms(wire: Wire, uid: str) -> dict[str, float]:
    return {event.event: event.elapsed_ms for event in wire.actor.trace.events_of(uid)}


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with running(stage()) as wire:
        await wire.announce(DETOKENIZER)
        yield wire


async def test_events_have_the_time_of_their_step_when_the_event_loop_comes_late(wire: Wire) -> None:
    send(wire, "a", 5)
    await wire.wait_for(SUBJECTS.reply(FRONTEND, "a"))
    while wire.statistics()["tokens"]["output"] < 5:
        pass  # the engine's thread counts on; the event loop does nothing else meanwhile
    await wire.until(lambda: "finished" in wire.events("a"))
    times = elapsed_ms(wire, "a")
    assert times["finished"] - times["first_token"] > 3.5 * STEP_S * 1e3
    assert times["first_token"] - times["admitted"] > 0.5 * STEP_S * 1e3


async def test_a_request_is_queued_when_it_is_taken_and_not_when_the_running_step_ends(wire: Wire) -> None:
    send(wire, "a", 6)
    await wire.until(lambda: "first_token" in wire.events("a"))  # the next step has just begun
    send(wire, "b", 1)
    await wire.until(lambda: "finished" in wire.events("b"))
    times = elapsed_ms(wire, "b")
    assert times["queued"] < 0.3 * STEP_S * 1e3
    assert times["admitted"] - times["queued"] > 0.4 * STEP_S * 1e3
