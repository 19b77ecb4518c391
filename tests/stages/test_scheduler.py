"""The scheduler stage alone, around the null engine: whom it takes, holds back, gives up, and what it says of that."""

from __future__ import annotations

from typing import Any

import pytest

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.null import NullRunner, NullSequence
from busllm.messages.codec import pack_ids, unpack_ids
from busllm.messages.control import StageState
from busllm.messages.to_detokenizer import MAX_UNACKNOWLEDGED, StepTokens
from busllm.messages.to_detokenizer import decoder as to_detokenizer
from busllm.messages.to_frontend import Failed, Taken
from busllm.messages.to_frontend import decoder as to_frontend
from busllm.messages.to_scheduler import ChoiceStart, Generate, StopMatched
from busllm.sampling import SamplingParams
from busllm.stages.scheduler.stage import SchedulerStage
from tests.stages.wire import DETOKENIZER, FRONTEND, SUBJECTS, Wire, running

pytestmark = pytest.mark.anyio

PROMPT = pack_ids([10, 20, 30])
MANY = 5000


def stage(**config: Any) -> SchedulerStage:
    sizes = {"num_pages": 1024, "max_running": 8, "max_context_tokens": 8000} | config
    return SchedulerStage(lambda: Engine(NullRunner(step_time_s=0.0005), EngineConfig(**sizes)))


def generate(uid: str, max_tokens: int = 20, *, attempt: int = 1, choices: int = 1, have: list[int] | None = None,
             frontend: str = FRONTEND) -> Generate:  # fmt: skip
    starts = tuple(ChoiceStart(choice, pack_ids(have or []), len(have or [])) for choice in range(choices))
    return Generate(uid, attempt, frontend, PROMPT, starts, SamplingParams(max_tokens=max_tokens), seed=7)


def answer(num_tokens: int) -> list[int]:
    sequence = NullSequence(PROMPT, SamplingParams(), 7, None)
    return [sequence.token(3 + index) for index in range(num_tokens)]


def send(wire: Wire, message: Generate) -> None:
    wire.send(SUBJECTS.generate(wire.actor.instance, message.uid), message)


def batches(wire: Wire, detokenizer: str = DETOKENIZER) -> list[StepTokens]:
    found = [to_detokenizer.decode(message.payload) for message in wire.said(SUBJECTS.detokenize(detokenizer))]
    assert all(isinstance(batch, StepTokens) for batch in found)
    return found  # type: ignore[return-value]


def tokens(wire: Wire, uid: str, attempt: int = 1, detokenizer: str = DETOKENIZER) -> dict[int, int]:
    """Token ids by index that a detokenizer was sent about choice 0."""
    handles: set[int] = set()
    found: dict[int, int] = {}
    for batch in batches(wire, detokenizer):
        handles |= {one.handle for one in batch.opened if (one.uid, one.choice, one.attempt) == (uid, 0, attempt)}
        offsets, ids = unpack_ids(batch.offsets).tolist(), unpack_ids(batch.token_ids).tolist()
        for row, handle in enumerate(unpack_ids(batch.handles).tolist()):
            if handle in handles:
                first = int(unpack_ids(batch.indexes)[row])
                for offset, token_id in enumerate(ids[offsets[row] : offsets[row + 1]]):
                    found[first + offset] = token_id
    return found


def has(wire: Wire, uid: str, number: int, **which: Any) -> Any:
    return lambda: len(tokens(wire, uid, **which)) >= number


def idle(wire: Wire) -> Any:
    def is_idle() -> bool:
        counts = wire.statistics()
        owned = counts["kv_pages"]["owned"]
        return counts["sequences"] == counts["running"] == counts["waiting"] == owned == 0

    return is_idle


class Detokenizer:
    """Acknowledges every batch, while it is asked to."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def acknowledge(self) -> None:
        message = self._wire.said(SUBJECTS.detokenize(DETOKENIZER))[-1]
        assert message.reply is not None
        number = to_detokenizer.decode(message.payload).number  # type: ignore[union-attr]
        self._wire.connection.publish(message.reply, str(number).encode())


@pytest.fixture
async def wire() -> Any:
    async with running(stage()) as wire:
        await wire.announce(DETOKENIZER)
        yield wire


async def test_a_request_is_taken_computed_and_sent_to_a_detokenizer(wire: Wire) -> None:
    send(wire, generate("u"))
    (taken,) = await wire.replies(to_frontend, 1, "u")
    assert taken == Taken("u", 1, "scheduler", wire.actor.instance, (0,))
    await wire.until(idle(wire))
    assert tokens(wire, "u") == dict(enumerate(answer(20)))
    assert [batch.number for batch in batches(wire)] == list(range(1, len(batches(wire)) + 1))
    (opened,) = batches(wire)[0].opened
    assert (opened.uid, opened.frontend, opened.prompt_tokens) == ("u", FRONTEND, 3)
    assert batches(wire)[-1].finished == ((0, "length"),)
    assert wire.events("u") == ["queued", "admitted", "prefilled", "first_token", "finished"]
    (admitted,) = [event for event in wire.actor.trace.events_of("u") if event.event == "admitted"]
    assert (admitted.data["prompt_tokens"], admitted.data["cached_tokens"]) == (3, 0)


async def test_tokens_wait_while_there_is_no_detokenizer_and_computing_stops() -> None:
    async with running(stage()) as wire:
        send(wire, generate("u", MANY))
        await wire.until(lambda: wire.statistics().get("tokens", {}).get("output", 0) > 0)
        computed = await settled_output(wire)
        assert computed < 10, "more would only pile up"
        await wire.announce(DETOKENIZER)
        await wire.until(has(wire, "u", 40))
        found = tokens(wire, "u")
        assert [found[index] for index in range(40)] == answer(40)


async def test_an_answer_that_ended_while_it_waited_is_sent_whole() -> None:
    async with running(stage()) as wire:
        send(wire, generate("u", 1))
        await wire.until(lambda: wire.statistics().get("tokens", {}).get("output", 0) == 1)
        await wire.settle()
        await wire.announce(DETOKENIZER)
        await wire.until(idle(wire))
        assert tokens(wire, "u") == dict(enumerate(answer(1)))


async def settled_output(wire: Wire) -> int:
    """The number of computed tokens once it no longer grows."""
    seen = -1

    def stands_still() -> bool:
        nonlocal seen
        before, seen = seen, wire.statistics()["tokens"]["output"]
        return seen == before

    await wire.until(stands_still)
    await wire.until(stands_still)
    return seen


async def test_sequences_of_a_lost_detokenizer_wait_for_their_owner(wire: Wire) -> None:
    send(wire, generate("u", MANY))
    await wire.until(has(wire, "u", 10))
    await wire.announce(DETOKENIZER, StageState.GONE)
    stopped_at = await settled_output(wire)
    assert stopped_at < MANY
    other = "detokenizer-1-dddddddd"
    await wire.announce(other)
    have = answer(5)
    send(wire, generate("u", MANY, attempt=2, have=have))
    await wire.until(has(wire, "u", 30, attempt=2, detokenizer=other))
    found = tokens(wire, "u", attempt=2, detokenizer=other)
    assert min(found) == 5, "from where the client is"
    assert [found[index] for index in range(5, 35)] == answer(35)[5:]


async def test_a_detokenizer_that_acknowledges_nothing_is_not_flooded(wire: Wire) -> None:
    send(wire, generate("u", MANY))
    await wire.until(lambda: len(batches(wire)) > MAX_UNACKNOWLEDGED)
    await settled_output(wire)
    held_at = len(batches(wire))
    assert held_at <= MAX_UNACKNOWLEDGED + 3
    Detokenizer(wire).acknowledge()
    await wire.until(lambda: len(batches(wire)) > held_at)
    found = tokens(wire, "u")
    assert list(found) == list(range(len(found))), "held back is not lost"


async def test_an_acknowledgement_that_is_none_harms_nobody(wire: Wire) -> None:
    send(wire, generate("u", MANY))
    await wire.until(has(wire, "u", 5))
    reply = wire.said(SUBJECTS.detokenize(DETOKENIZER))[0].reply
    assert reply is not None
    for payload in (b"many", b"", b"-5", b"999999999"):
        wire.connection.publish(reply, payload)
    wire.connection.publish(reply + "x", b"1")
    await wire.until(has(wire, "u", 20))


async def test_a_higher_attempt_adopts_what_runs_and_gets_what_the_client_lacks(wire: Wire) -> None:
    send(wire, generate("u", MANY))
    await wire.until(has(wire, "u", 30))
    before = wire.statistics()["tokens"]["prompt"]
    send(wire, generate("u", MANY, attempt=2, have=answer(10)))
    await wire.abort("u", b"1")
    await wire.until(has(wire, "u", 40, attempt=2))
    found = tokens(wire, "u", attempt=2)
    assert min(found) == 10
    assert [found[index] for index in range(10, 50)] == answer(50)[10:]
    assert wire.statistics()["tokens"]["prompt"] == before, "nothing is computed again"
    assert wire.statistics()["sequences"] == 1


async def test_the_same_attempt_twice_is_computed_once(wire: Wire) -> None:
    send(wire, generate("u", MANY))
    send(wire, generate("u", MANY))
    await wire.until(has(wire, "u", 5))
    assert wire.statistics()["sequences"] == wire.statistics()["running"] == 1


@pytest.mark.parametrize("payload", [b"", b"1"])
async def test_an_abort_ends_every_choice_and_overtakes_its_request(wire: Wire, payload: bytes) -> None:
    send(wire, generate("u", MANY, choices=3))
    await wire.until(has(wire, "u", 3))
    await wire.abort("u", payload)
    await wire.until(idle(wire))
    await wire.until(lambda: wire.events("u")[-1] == "aborted")
    await wire.abort("v", payload)
    send(wire, generate("v"))
    send(wire, generate("w"))
    await wire.until(has(wire, "w", 20))
    assert tokens(wire, "v") == {}


async def test_a_matched_stop_string_ends_one_choice(wire: Wire) -> None:
    send(wire, generate("u", MANY, choices=2))
    await wire.until(has(wire, "u", 3))
    wire.send(SUBJECTS.stop(wire.actor.instance), StopMatched((("u", 0, 1), ("unknown", 0, 1), ("u", 1, 9))))
    await wire.until(lambda: wire.statistics()["running"] == 1)
    answered = await wire.ask("probe", {"uids": ["u"]})
    states = {choice: state for choice, _, state, _ in answered["sequences"]["u"]}
    assert states == {0: "finished", 1: "running"}


async def test_requests_of_an_owner_that_is_gone_are_dropped(wire: Wire) -> None:
    send(wire, generate("u", MANY))
    send(wire, generate("v", MANY, frontend="frontend-1-eeeeeeee"))
    await wire.until(lambda: wire.statistics()["running"] == 2)
    await wire.announce(FRONTEND, StageState.GONE)
    await wire.until(lambda: wire.statistics()["running"] == 1)
    assert set((await wire.ask("probe", {"uids": ["u", "v"]}))["sequences"]) == {"v"}


async def test_what_can_never_be_computed_is_refused_at_once(wire: Wire) -> None:
    too_long = Generate("u", 1, FRONTEND, pack_ids([1] * 9000), (ChoiceStart(0),), SamplingParams(), seed=7)
    send(wire, too_long)
    _, failed = await wire.replies(to_frontend, 2, "u")
    assert isinstance(failed, Failed)
    assert (failed.code, failed.status, failed.retryable) == ("context_length_exceeded", 400, False)
    await wire.until(idle(wire))
    assert "failed" in wire.events("u")


async def test_a_full_queue_refuses_with_429() -> None:
    async with running(stage(max_running=1, max_waiting=1)) as wire:
        await wire.announce(DETOKENIZER)
        send(wire, generate("u", MANY))
        await wire.until(lambda: wire.statistics()["running"] == 1)
        send(wire, generate("v"))
        send(wire, generate("w"))
        _, failed = await wire.replies(to_frontend, 2, "w")
        assert (failed.code, failed.status) == ("queue_full", 429)
        assert (await wire.ask("probe", {"uids": ["v"]}))["sequences"]["v"] == [[0, 1, "waiting", 0]]


async def test_the_prefix_cache_is_emptied_on_request(wire: Wire) -> None:
    prompt = pack_ids(list(range(64)))
    send(wire, Generate("u", 1, FRONTEND, prompt, (ChoiceStart(0),), SamplingParams(max_tokens=2), seed=7))
    await wire.until(lambda: "finished" in wire.events("u"))
    await wire.until(idle(wire))
    cached = wire.statistics()["kv_pages"]["cached"]
    assert cached > 0
    assert await wire.ask("reset_cache") == {"freed_pages": cached}
    await wire.until(lambda: wire.statistics()["kv_pages"]["cached"] == 0)


async def test_a_drain_finishes_what_runs_and_refuses_what_is_new(wire: Wire) -> None:
    send(wire, generate("u", 200))
    await wire.until(has(wire, "u", 3))
    wire.actor.stop()
    await wire.settle()
    send(wire, generate("v"))
    (failed,) = await wire.replies(to_frontend, 1, "v")
    assert (failed.code, failed.retryable) == ("draining", True)
    while not has(wire, "u", 200)():
        Detokenizer(wire).acknowledge()
        await wire.settle()
    assert tokens(wire, "u") == dict(enumerate(answer(200)))
