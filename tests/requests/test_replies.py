"""What replies mean: the first terminal of the current attempt counts, and nothing else ends or changes a request."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from busllm.errors import Aborted, BusllmError, NeverFits, QueueFull, RemoteError
from busllm.messages.codec import unpack_ids
from busllm.messages.to_frontend import Tokenized
from busllm.messages.to_frontend import failed as failure_of
from busllm.messages.to_tokenizer import ChatPrompt, Prompt, TextPrompt
from busllm.requests.generation import GenerationRequest
from busllm.requests.live import WaitsFor
from busllm.sampling import SamplingParams
from tests.requests.played import OTHER_SCHEDULER, TOKENIZER, Stages, failed, playing, read, request
from tests.stages.wire import SCHEDULER, SUBJECTS

pytestmark = pytest.mark.anyio


@pytest.fixture
async def stages() -> AsyncIterator[Stages]:
    async with playing() as stages:
        yield stages


async def test_a_request_goes_to_a_tokenizer_and_its_text_comes_back(stages: Stages) -> None:
    live = stages.owner.submit(request())
    await stages.wire.settle()
    (message,) = stages.tokenize(live)
    assert (message.attempt, message.seed, message.frontend) == (1, 7, stages.wire.actor.instance)
    await stages.until_running(live)
    await stages.text(live, 0, "ab")
    await stages.text(live, 2, "c", end="length")
    deltas = await read(live)
    assert "".join(delta.text for delta in deltas) == "abc"
    assert deltas[-1].finish_reason == "length"
    assert stages.owner.num_open == 0
    assert stages.wire.events(live.uid) == ["received", "first_text", "finished"]


async def test_what_is_repeated_is_ignored(stages: Stages) -> None:
    live = stages.owner.submit(request())
    await stages.until_running(live)
    for index, text in ((0, "ab"), (0, "ab"), (0, "a"), (2, "c"), (1, "bc")):
        await stages.text(live, index, text)
    await stages.text(live, 3, "d", end="stop")
    assert "".join(delta.text for delta in await read(live)) == "abcd"
    assert stages.generate(live) == []


async def test_a_hole_starts_the_next_attempt_from_what_the_client_has(stages: Stages) -> None:
    live = stages.owner.submit(request())
    await stages.until_running(live)
    await stages.text(live, 0, "ab")
    await stages.text(live, 3, "d")
    ((scheduler, sent),) = stages.generate(live)
    assert (scheduler, sent.attempt) == (SCHEDULER, 2), "who has it may adopt it"
    assert unpack_ids(sent.prompt_ids).tolist() == [1, 2, 3]
    (start,) = sent.choices
    assert (unpack_ids(start.output_ids).tolist(), start.delivered_chars) == ([97, 98], 2)
    assert stages.aborts(live) == [b"1"]
    await stages.text(live, 2, "c", attempt=1)
    await stages.text(live, 2, "C", attempt=2)
    await stages.text(live, 3, "D", attempt=2, end="stop")
    assert "".join(delta.text for delta in await read(live)) == "abCD"


async def test_new_work_is_published_before_the_abort_of_the_old(stages: Stages) -> None:
    live = stages.owner.submit(request())
    await stages.until_running(live)
    await stages.text(live, 1, "hole")
    said = [message.subject.split(".")[2] for message in stages.wire.heard if message.subject.endswith(live.uid)]
    assert said[-2:] == ["generate", "abort"]


async def test_only_unfinished_choices_are_sent_on(stages: Stages) -> None:
    live = stages.owner.submit(request(n=3))
    await stages.until_running(live)
    await stages.text(live, 0, "x", choice=1, end="stop")
    await stages.text(live, 5, "hole", choice=2)
    ((_, sent),) = stages.generate(live)
    assert [start.choice for start in sent.choices] == [0, 2]
    await stages.text(live, 0, "again", choice=1, attempt=2, end="length")
    for choice in (0, 2):
        await stages.text(live, 0, "y", choice=choice, attempt=2, end="stop")
    ends = [delta for delta in await read(live) if delta.finish_reason]
    assert [delta.finish_reason for delta in ends] == ["stop", "stop", "stop"]


async def test_a_failure_that_cannot_be_retried_ends_it_everywhere(stages: Stages) -> None:
    live = stages.owner.submit(request())
    await stages.tell(live, failed(live, "context_length_exceeded", retryable=False, stage="tokenizer"))
    await stages.text(live, 0, "late", end="stop")
    with pytest.raises(RemoteError) as raised:
        await read(live)
    assert raised.value.code == "context_length_exceeded"
    assert stages.aborts(live) == [b""]
    assert stages.wire.events(live.uid)[-1] == "failed"


@pytest.mark.parametrize(
    ("prompt", "field"),
    [(TextPrompt("abc"), "prompt"), (ChatPrompt([{"role": "user", "content": "abc"}]), "messages")],
)
async def test_a_scheduler_that_refuses_token_ids_blames_the_field_that_they_were_made_of(
    stages: Stages, prompt: Prompt, field: str
) -> None:
    live = stages.owner.submit(GenerationRequest((prompt,), SamplingParams(seed=7), n=1))
    await stages.until_running(live)
    await stages.tell(live, failure_of(live.uid, 1, "scheduler", NeverFits(900, 64)))
    with pytest.raises(RemoteError) as error:
        await read(live)
    assert (error.value.code, error.value.param) == ("exceeds_kv_capacity", field)


async def test_a_full_queue_is_the_clients_to_know(stages: Stages) -> None:
    live = stages.owner.submit(request())
    await stages.until_running(live)
    await stages.tell(live, failed(live, "queue_full", retryable=True))
    with pytest.raises(RemoteError) as raised:
        await read(live)
    assert raised.value.code == "queue_full"


async def test_a_draining_stage_is_left_for_another(stages: Stages) -> None:
    stages.present.append(OTHER_SCHEDULER)
    await stages.announce()
    live = stages.owner.submit(request())
    await stages.until_running(live)
    await stages.tell(live, failed(live, "draining", retryable=True))
    ((scheduler, sent),) = stages.generate(live)
    assert scheduler == OTHER_SCHEDULER
    assert SCHEDULER in sent.avoid


async def test_failures_of_earlier_attempts_are_ignored(stages: Stages) -> None:
    live = stages.owner.submit(request())
    await stages.until_running(live)
    await stages.text(live, 1, "hole")
    await stages.tell(live, failed(live, "lost", retryable=True), failed(live, "internal", retryable=False))
    assert (live.attempt, live.is_done) == (2, False)


async def test_an_abort_from_anybody_ends_it_with_its_own_word(stages: Stages) -> None:
    live = stages.owner.submit(request())
    await stages.wire.abort(live.uid)
    with pytest.raises(Aborted):
        await read(live)
    assert stages.owner.num_open == 0
    assert stages.wire.events(live.uid)[-1] == "aborted"


async def test_an_abort_of_an_earlier_attempt_is_none_of_the_current_one(stages: Stages) -> None:
    live = stages.owner.submit(request())
    await stages.until_running(live)
    await stages.text(live, 1, "hole")
    await stages.wire.abort(live.uid, b"1")
    assert not live.is_done
    await stages.wire.abort(live.uid, b"2")
    assert live.is_done


async def test_ids_without_a_scheduler_wait_for_one(stages: Stages) -> None:
    live = stages.owner.submit(request())
    await stages.tell(live, Tokenized(live.uid, 1, (b"\1\0\0\0",), None))
    assert live.waits_for is WaitsFor.SCHEDULER
    await stages.pass_time(0.2)
    ((scheduler, sent),) = stages.generate(live)
    assert (scheduler, sent.attempt) == (SCHEDULER, 1)


async def test_only_what_waits_for_its_first_text_fills_the_queue() -> None:
    async with playing(max_queued=2) as stages:
        first = stages.owner.submit(request())
        stages.owner.submit(request())
        with pytest.raises(QueueFull):
            stages.owner.submit(request())
        await stages.until_running(first)
        await stages.text(first, 0, "a")
        stages.owner.submit(request())
        with pytest.raises(QueueFull):
            stages.owner.submit(request())


async def test_what_does_not_decode_harms_nobody(stages: Stages) -> None:
    live = stages.owner.submit(request())
    await stages.until_running(live)
    stages.wire.connection.publish(SUBJECTS.reply_step(stages.wire.actor.instance), b"\xc1")
    await stages.text(live, 0, "a", end="stop")
    assert [delta.text for delta in await read(live)] == ["a"]


async def test_a_request_without_a_tokenizer_is_refused_with_its_name(stages: Stages) -> None:
    stages.present.remove(TOKENIZER)
    await stages.pass_time(7.0)
    live = stages.owner.submit(request())
    await stages.pass_time(1.5)
    with pytest.raises(BusllmError, match="tokenizer") as raised:
        await read(live)
    assert raised.value.status == 503
