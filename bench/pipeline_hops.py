"""What each hop of the pipeline costs by itself: CPU time per token, with a batch of so many streams.

Owns: one measurement per hop; each drives the code that the stages run, in this thread, and nothing else.
Does not know: whole servers (`pipeline_servers.py`), the table (`pipeline.py`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np

from busllm.actors.actor import Actor, ActorSettings
from busllm.actors.behaviour import Behaviour
from busllm.actors.clock import SystemClock, Timings
from busllm.bus.memory import MemoryBus
from busllm.bus.nats import NatsBus
from busllm.bus.nats_options import NatsOptions
from busllm.bus.nats_server import EmbeddedNatsServer, NatsServerOptions
from busllm.bus.protocol import Bus, Message
from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.null import NullRunner
from busllm.engine.sequence import SequenceRequest, SequenceTokens
from busllm.messages import to_detokenizer, to_frontend
from busllm.messages.codec import encode, pack_ids
from busllm.messages.columns import unpack_column, unpack_rows
from busllm.messages.to_detokenizer import StepTokens
from busllm.messages.to_frontend import StepText, Taken
from busllm.messages.to_scheduler import ChoiceStart, Generate
from busllm.requests.generation import GenerationRequest
from busllm.requests.live import LiveRequest
from busllm.requests.owner import RequestOwner
from busllm.requests.owner_behaviour import OwnerBehaviour
from busllm.sampling import SamplingParams
from busllm.stages.detokenizer.stage import DetokenizerStage
from busllm.stages.scheduler.detokenizer_link import DetokenizerLink
from busllm.stages.scheduler.held_sequence import HeldSequence
from busllm.testing.frontend_server import MODEL, fake_settings, serving
from busllm.text.null_tokenizer import NullTokenizer

NUM_STEPS = 400
PROMPT = pack_ids([97] * 100)
FRONTEND, SCHEDULER, DETOKENIZER = "frontend-0-aaaaaaaa", "scheduler-0-bbbbbbbb", "detokenizer-0-cccccccc"
# Nobody but the measured stage is there, and nobody is missed.
ALONE = Timings(silence_s=1e6, first_stage_s=1e6, resume_deadline_s=1e6)
# As long as a frontend's step lasts at least, so that each token is an event of its own.
STEP_S = 0.002


def hop_costs(num_streams: int) -> dict[str, float]:
    """Microseconds of CPU time per token, by hop, in the order of the path."""
    measured = {
        "null engine: plan, check, sample, hand out": _engine(num_streams),
        "scheduler → StepTokens: fill and encode": _fill_and_encode(num_streams),
        "StepTokens: decode": _decode_tokens(num_streams),
    }
    measured |= _run(_detokenizer, num_streams)
    measured["StepText: decode"] = _decode_text(num_streams)
    measured |= _run(_owner_and_http, num_streams)
    return measured


def bus_costs(num_streams: int) -> dict[str, float]:
    """Microseconds of CPU time per message of a step's size: publish and receive, by bus."""
    return _run(_buses, num_streams)


def _per_token(step: Callable[[], object], num_tokens: int) -> float:
    """CPU time of this thread per token of a repeated step, in microseconds."""
    for _ in range(NUM_STEPS // 10):
        step()
    began_s = time.thread_time()
    for _ in range(NUM_STEPS):
        step()
    return (time.thread_time() - began_s) / NUM_STEPS / num_tokens * 1e6


# ---------------------------------------------------------------- scheduler


def _engine(num_streams: int) -> float:
    config = EngineConfig(num_pages=16384, max_running=num_streams, max_context_tokens=8192)
    engine = Engine(NullRunner(), config)
    params = SamplingParams(max_tokens=8000, ignore_eos=True)
    for number in range(num_streams):
        engine.submit(SequenceRequest(f"u{number}", 0, 1, np.full(100, 97, "<i4"), np.zeros(0, "<i4"), params, number))
    while engine.statistics().output_tokens < 10 * num_streams:
        engine.step()
    return _per_token(engine.step, num_streams)


def _held(number: int) -> HeldSequence:
    start = ChoiceStart(0)
    generate = Generate(f"{number:020}", 1, FRONTEND, PROMPT, (start,), SamplingParams(), 1)
    return HeldSequence(generate, start)


def _fill_and_encode(num_streams: int) -> float:
    link = DetokenizerLink(SCHEDULER, DETOKENIZER)
    held = [_held(number) for number in range(num_streams)]
    for one in held:
        link.open(one)
    link.take_batch()
    tokens = [SequenceTokens(one.generate.uid, 0, 1, 100, (97,)) for one in held]

    def step() -> None:
        for one, new in zip(held, tokens, strict=True):
            link.add(one, new)
        encode(link.take_batch())

    return _per_token(step, num_streams)


def _step_tokens(num_streams: int, index: int, opened: tuple[Any, ...] = ()) -> bytes:
    batch = StepTokens(
        SCHEDULER,
        index + 1,
        opened,
        pack_ids(range(num_streams)),
        pack_ids([index] * num_streams),
        pack_ids(range(num_streams + 1)),
        pack_ids([97 + row % 26 for row in range(num_streams)]),
    )
    return encode(batch)


def _decode_tokens(num_streams: int) -> float:
    payload = _step_tokens(num_streams, 7)

    def step() -> None:
        batch = to_detokenizer.decoder.decode(payload)
        assert isinstance(batch, StepTokens)
        unpack_column(batch.handles, num_streams)
        unpack_column(batch.indexes, num_streams)
        unpack_rows(batch.offsets, batch.token_ids, num_streams)

    return _per_token(step, num_streams)


# ---------------------------------------------------------------- stages


@asynccontextmanager
async def _running(behaviour: Behaviour) -> AsyncIterator[tuple[Actor, Mapping[str, Callable[[Message], None]]]]:
    """Runs a stage alone on a memory bus; gives it and its handlers, to be called from here."""
    settings = ActorSettings(cluster="bench", host="here", timings=ALONE)
    actor = Actor(behaviour, 0, MemoryBus(), settings, SystemClock())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        await actor.ready.wait()
        yield actor, behaviour.inboxes()
        tasks.cancel_scope.cancel()


async def _detokenizer(num_streams: int) -> dict[str, float]:
    stage = DetokenizerStage(NullTokenizer)
    async with _running(stage) as (actor, handlers):
        subject = actor.subjects.detokenize(actor.instance)
        link = DetokenizerLink(SCHEDULER, actor.instance)
        for number in range(num_streams):
            link.open(_held(number))
        batch = link.take_batch()
        assert batch is not None
        handlers[subject](Message(subject, encode(batch), None, 1))
        payloads = iter([_step_tokens(num_streams, index) for index in range(2 * NUM_STEPS)])

        def step() -> None:
            handlers[subject](Message(subject, next(payloads), None, 1))
            stage.received_all()

        return {"detokenizer: batch in, text batch out": _per_token(step, num_streams)}


def _step_text(uids: list[str], index: int) -> bytes:
    num_rows = len(uids)
    batch = StepText(
        DETOKENIZER,
        tuple(uids),
        pack_ids([0] * num_rows),
        pack_ids([1] * num_rows),
        pack_ids([index] * num_rows),
        tuple(chr(97 + row % 26) for row in range(num_rows)),
        pack_ids(range(num_rows + 1)),
        pack_ids([97 + row % 26 for row in range(num_rows)]),
    )
    return encode(batch)


def _decode_text(num_streams: int) -> float:
    payload = _step_text([f"{number:020}" for number in range(num_streams)], 7)

    def step() -> None:
        batch = to_frontend.decoder.decode(payload)
        assert isinstance(batch, StepText)
        for column in (batch.indexes, batch.choices, batch.attempts):
            unpack_column(column, num_streams)
        unpack_rows(batch.offsets, batch.token_ids, num_streams)

    return _per_token(step, num_streams)


class _NotedOwner(RequestOwner):
    """An owner that tells which requests it was given."""

    def __init__(self) -> None:
        super().__init__(max_queued=10_000)
        self.uids: list[str] = []

    def submit(self, request: GenerationRequest) -> LiveRequest:
        live = super().submit(request)
        self.uids.append(live.uid)
        return live


async def _owner_and_http(num_streams: int) -> dict[str, float]:
    """Streams of a real frontend, whose text is made here; `busllm bench` reads them."""
    owner = _NotedOwner()
    async with _running(OwnerBehaviour("frontend", owner, is_unique=False)) as (actor, handlers):
        subject = actor.subjects.reply_step(actor.instance)
        take = handlers[actor.subjects.reply(actor.instance, "*")]
        async with serving(owner, fake_settings()) as server:
            command = [sys.executable, "-m", "busllm.cli.main", "bench", "--url", server.url, "--model", MODEL]
            command += [
                "--concurrency",
                str(num_streams),
                "--requests",
                str(num_streams),
                "--warmup",
                "0",
                "--output",
                "4000",
            ]
            client = await anyio.open_process([*command, "--json", "-"], stderr=subprocess.DEVNULL)
            with anyio.fail_after(30):
                while len(owner.uids) < num_streams:
                    await anyio.sleep(0.01)
            for uid in owner.uids:
                take(Message(subject, encode(Taken(uid, 1, "scheduler", SCHEDULER)), None, 1))
            payloads = [_step_text(owner.uids, index) for index in range(2 * NUM_STEPS)]
            busy_s = {"owner": 0.0, "all": 0.0}
            for number, payload in enumerate(payloads):
                began_s = time.thread_time()
                take(Message(subject, payload, None, 1))
                taken_s = time.thread_time()
                await anyio.sleep(STEP_S)  # the streams are written
                if number >= NUM_STEPS:
                    busy_s["owner"] += taken_s - began_s
                    busy_s["all"] += time.thread_time() - began_s
            client.terminate()
            await client.wait()
    num_tokens = NUM_STEPS * num_streams / 1e6
    return {
        "owner: text batch in, rows to their requests": busy_s["owner"] / num_tokens,
        "SSE: wake, event, exchange, hypercorn, socket": (busy_s["all"] - busy_s["owner"]) / num_tokens,
    }


# ---------------------------------------------------------------- bus


async def _buses(num_streams: int) -> dict[str, float]:
    payload = _step_tokens(num_streams, 7)
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=Path(directory)))
        await server.start()
        try:
            nats = NatsBus(NatsOptions(urls=(server.url,)))
            return {"memory": await _round_trip(MemoryBus(), payload), "NATS": await _round_trip(nats, payload)}
        finally:
            await server.stop()


async def _round_trip(bus: Bus, payload: bytes) -> float:
    """CPU time of this thread to publish one message and to receive it, in microseconds."""
    async with AsyncExitStack() as stack:
        sender = await bus.connect(name="sender", inbox="bench.inbox.sender")
        stack.push_async_callback(sender.close)
        receiver = await bus.connect(name="receiver", inbox="bench.inbox.receiver")
        stack.push_async_callback(receiver.close)
        await receiver.subscribe("bench.step")
        began_s = time.thread_time()
        for _ in range(NUM_STEPS):
            sender.publish("bench.step", payload)
            await receiver.receive()
        return (time.thread_time() - began_s) / NUM_STEPS * 1e6


def _run(measure: Callable[[int], Awaitable[dict[str, float]]], num_streams: int) -> dict[str, float]:
    """Runs a measurement on the event loop that stages have."""
    return anyio.run(measure, num_streams, backend_options={"use_uvloop": True})
