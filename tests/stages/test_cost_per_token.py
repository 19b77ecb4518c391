"""What a token costs on its way, counted: messages, bytes, wake-ups, tasks and sends are the same on every machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anyio
import msgspec
import pytest

from busllm.actors.clock import Timings
from busllm.requests.generation import GenerationRequest
from busllm.stages.frontend.app import build_app
from busllm.testing.counting_bus import CountingBus, Sent
from busllm.testing.fake_owner import FakeOwner, Step, last_delta, say, word_delta
from busllm.testing.frontend_server import MODEL, FrontendServer, fake_settings, serving
from busllm.testing.stack import StackConfig, running_stack

NUM_STREAMS, NUM_TOKENS = 16, 100
ALL_TOKENS = NUM_STREAMS * NUM_TOKENS
# A busy machine must not look like a stage that is silent.
PATIENT = Timings(taken_s=30.0, silence_s=30.0, suspect_s=30.0, gone_s=60.0, first_stage_s=30.0)


class Counts(msgspec.Struct, frozen=True):
    """What streams through a whole stack, with HTTP in front of it, took.

    Attributes:
        num_steps: of the engine.
        num_pieces: events with text that clients saw.
        num_tasks: that were made on the event loop, those of the clients among them.
        wake_ups: of the mailboxes of detokenizer and owner.
        sent: all messages.
    """

    num_steps: int
    num_pieces: int
    num_tasks: int
    wake_ups: dict[str, int]
    sent: list[Sent]

    def on(self, kind: str) -> list[Sent]:
        """Messages of the subjects `busllm.<cluster>.<kind>.…`."""
        return [one for one in self.sent if one.subject.split(".")[2] == kind]

    @property
    def texts(self) -> list[Sent]:
        """Batches of text to the frontend."""
        return [one for one in self.on("reply") if one.subject.endswith(".step")]


@pytest.fixture(scope="module")
def counts() -> Counts:
    return anyio.run(stream_and_count, NUM_TOKENS)


@pytest.fixture(scope="module")
def of_longer_answers() -> Counts:
    return anyio.run(stream_and_count, 2 * NUM_TOKENS)


async def stream_and_count(num_tokens: int) -> Counts:
    bus, loop = CountingBus(), asyncio.get_running_loop()
    num_tasks = num_pieces = 0

    def count_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal num_tasks
        num_tasks += 1
        return asyncio.Task(coroutine, loop=loop, **options)

    async def read(server: FrontendServer, number: int) -> None:
        nonlocal num_pieces
        body = {"model": MODEL, "prompt": f"prompt {number}", "max_tokens": num_tokens, "stream": True}
        async with server.client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                num_pieces += line.startswith("data: {") and '"text":""' not in line

    async with (
        running_stack(bus, StackConfig(step_time_s=0.002, timings=PATIENT)) as stack,
        serving(stack.owner, fake_settings()) as server,
    ):
        bus.sent.clear()
        bus.wake_ups.clear()
        loop.set_task_factory(count_task)
        async with anyio.create_task_group() as tasks:
            for number in range(NUM_STREAMS):
                tasks.start_soon(read, server, number)
        loop.set_task_factory(None)
        num_steps = stack.actors["scheduler:0"].announcement().statistics["steps"]
        wake_ups = {name: bus.wake_ups[stack.actors[name].instance] for name in ("detokenizer:0", "owner:0")}
        return Counts(num_steps, num_pieces, num_tasks, wake_ups, list(bus.sent))


def test_a_step_is_one_message_to_the_detokenizer_and_at_most_one_to_the_frontend(counts: Counts) -> None:
    assert len(counts.on("detokenize")) <= counts.num_steps
    assert len(counts.texts) <= len(counts.on("detokenize"))


def test_a_request_costs_six_messages_however_long_its_answer_is(counts: Counts) -> None:
    assert len(counts.on("tokenize")) == NUM_STREAMS
    assert len(counts.on("generate")) == NUM_STREAMS
    # The word of each stage that it has the request, and the prompt's ids.
    assert len(counts.on("reply")) - len(counts.texts) == 4 * NUM_STREAMS


@pytest.mark.parametrize(("subject", "bytes_per_token"), [("detokenize", 16), ("texts", 44)])
def test_a_token_is_16_bytes_to_the_detokenizer_and_44_to_the_frontend(
    counts: Counts, of_longer_answers: Counts, subject: str, bytes_per_token: int
) -> None:
    """The difference that longer answers make: the ends of sequences are in both."""

    def size(counts: Counts) -> tuple[int, int]:
        sent = counts.texts if subject == "texts" else counts.on(subject)
        return len(sent), sum(one.num_bytes for one in sent)

    (few, bytes_of_few), (more, bytes_of_more) = size(counts), size(of_longer_answers)
    around = 48 * (more - few)  # what each message says of itself
    assert bytes_of_more - bytes_of_few <= bytes_per_token * ALL_TOKENS + around


@pytest.mark.parametrize("stage", ["detokenizer:0", "owner:0"])
def test_a_step_wakes_a_stage_once(counts: Counts, stage: str) -> None:
    of_steps = {
        "detokenize": len(counts.on("detokenize")),
        "reply": len(counts.texts),
        "trace": len(counts.on("trace")),
    }
    others = len(counts.sent) - sum(of_steps.values())  # requests, announcements
    assert counts.wake_ups[stage] <= counts.num_steps + others


def test_no_task_is_made_for_a_token(counts: Counts) -> None:
    assert counts.num_tasks < ALL_TOKENS / 4  # some for each connection and each request


def test_a_token_is_an_event_of_its_own(counts: Counts) -> None:
    assert counts.num_pieces == ALL_TOKENS


# ---------------------------------------------------------------- the way out of a frontend


async def sends_of(owner: FakeOwner) -> list[bytes]:
    """The bodies that the frontend hands to the HTTP server for one stream, each with one call."""
    body = b'{"model": "%b", "prompt": "x", "max_tokens": 99, "stream": true}' % MODEL.encode()
    arriving: Iterator[dict[str, Any]] = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[bytes] = []

    async def receive() -> dict[str, Any]:
        event = next(arriving, None)
        if event is None:
            await anyio.sleep_forever()
        assert event is not None
        return event

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    head = [(b"content-length", str(len(body)).encode())]
    path = "/v1/completions"
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": head,
    }  # fmt: skip
    await build_app(owner, fake_settings())(scope, receive, send)
    return sent


@pytest.mark.anyio
async def test_a_token_that_comes_alone_is_one_send() -> None:
    words = [f" word{number}" for number in range(50)]
    sent = await sends_of(FakeOwner(say(words)))
    # The tokens, the end, `[DONE]`, the end of the body.
    assert [body.count(b"data: ") for body in sent] == [1] * 50 + [1, 1, 0]


@pytest.mark.anyio
async def test_tokens_that_wait_are_one_send_and_an_event_each() -> None:
    def script(request: GenerationRequest) -> Iterator[Step]:
        for start in range(0, 50, 10):
            yield [word_delta(request, 0, number, f" {number}") for number in range(start, start + 10)]
        yield [last_delta(request, 0, 50, "stop")]

    sent = await sends_of(FakeOwner(script))
    assert [body.count(b"data: ") for body in sent] == [10] * 5 + [1, 1, 0]
