"""What the tables of a stage cost, by the number of requests and of other stages.

Owns: an owner's tick, the tables that every stage keeps, the directory.
Does not know: the bus (`buses.py`), the engine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import anyio

from bench.scaling.figure import Figure, curves
from bench.scaling.timing import cpu_us
from busllm.actors.actor import Actor, ActorSettings
from busllm.actors.clock import Timings
from busllm.actors.directory import Directory
from busllm.bus.memory import MemoryBus
from busllm.ids import new_uid
from busllm.messages.codec import pack_ids
from busllm.messages.control import Announcement, StageState, Versions
from busllm.messages.to_scheduler import ChoiceStart, Generate
from busllm.messages.to_tokenizer import TextPrompt
from busllm.requests.agenda import Agenda
from busllm.requests.generation import GenerationRequest
from busllm.requests.live import LiveRequest, Phase
from busllm.requests.owner import RequestOwner
from busllm.requests.owner_behaviour import OwnerBehaviour
from busllm.requests.routing import pick
from busllm.requests.sending import Sender
from busllm.requests.tombstones import Tombstones
from busllm.requests.watch import Watch
from busllm.sampling import SamplingParams
from busllm.stages.scheduler.held_sequence import HeldSequence
from busllm.stages.scheduler.held_table import HeldTable
from busllm.telemetry.trace import TraceLevel, TraceRecorder
from busllm.testing.clock import ManualClock

OPEN_REQUESTS = (10, 100, 1_000, 10_000)
NUM_STAGES = (4, 12, 40, 100, 300)
KINDS = ("frontend", "tokenizer", "scheduler", "detokenizer")
REQUEST = GenerationRequest((TextPrompt("abc"),), SamplingParams(seed=7, max_tokens=50))
PROMPT = pack_ids([97] * 100)
_TICKS_PER_S = 10
_TICKS_PER_WORD = 5  # of each request


def figures() -> Iterator[Figure]:
    """By open requests, then by stages."""
    yield Figure(
        name="owner_tick",
        title="What an owner of requests does ten times a second, while all its requests stream",
        x_label="open requests",
        y_label="µs per tick",
        curves=curves(("mean of a second's ticks",), OPEN_REQUESTS, lambda number: [anyio.run(_ticks_us, number)]),
    )
    yield Figure(
        name="request_tables",
        title="What the tables of a stage cost per message",
        x_label="requests in the table",
        y_label="µs",
        curves=curves(
            ("scheduler: take a sequence and let it go", "remember an abort and ask for it", "record a trace event"),
            OPEN_REQUESTS,
            lambda number: (_held_us(number), _tombstones_us(number), _trace_us(number)),
        ),
    )
    yield Figure(
        name="directory",
        title="The directory: who is there",
        x_label="stages",
        y_label="µs",
        curves=curves(
            ("hear one heartbeat", "choose a scheduler (a quarter of the stages)", "judge all by their silence"),
            NUM_STAGES,
            _directory_us,
        ),
        log_y=True,
    )


# ---------------------------------------------------------------- requests


async def _ticks_us(num_open: int) -> float:
    """Mean CPU time of the ticks of a second in which each request speaks twice."""
    clock = ManualClock()
    settings = ActorSettings(cluster="bench", host="here", timings=Timings(), trace_level=TraceLevel.OFF)
    actor = Actor(OwnerBehaviour("client", RequestOwner(1), is_unique=False), 0, MemoryBus(), settings, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        await actor.ready.wait()
        lives = [_streaming(clock.monotonic()) for _ in range(num_open)]
        agenda = Agenda()
        watch = Watch(actor, Sender(actor, agenda), agenda, {live.uid: live for live in lives}, lambda live: None)
        for live in lives:
            agenda.note(live.uid, clock.monotonic())
        busy_s = 0.0
        for tick in range(3 * _TICKS_PER_S):
            await clock.advance(1 / _TICKS_PER_S)
            for kind in KINDS:
                actor.directory.hear(_announced(kind, 0), clock.monotonic())
            for live in lives[tick % _TICKS_PER_WORD :: _TICKS_PER_WORD]:
                live.choices[0].heard(clock.monotonic())
            began_s = time.thread_time()
            watch.tick()
            if tick >= 2 * _TICKS_PER_S:  # before, all are looked at since all are new
                busy_s += time.thread_time() - began_s
        tasks.cancel_scope.cancel()
    return busy_s / _TICKS_PER_S * 1e6


def _streaming(now: float) -> LiveRequest:
    live = LiveRequest(new_uid(), REQUEST, 7, now)
    live.attempt, live.phase, live.scheduler, live.detokenizer = 1, Phase.SCHEDULED, "scheduler-0", "detokenizer-0"
    live.choices[0].taken = True
    return live


def _held_us(num_held: int) -> float:
    table = HeldTable()

    def take() -> HeldSequence:
        generate = Generate(new_uid(), 1, "frontend-0", PROMPT, (ChoiceStart(0),), SamplingParams(), 1)
        held = HeldSequence(generate, generate.choices[0])
        table.add(held)
        return held

    for _ in range(num_held):
        take()

    def take_and_let_go() -> None:
        held = take()
        table.assign(held, "detokenizer-0")
        table.remove(held, finished=True)

    return cpu_us(take_and_let_go, 1_000)


def _tombstones_us(num_buried: int) -> float:
    tombstones = Tombstones()
    for number in range(num_buried):
        tombstones.bury(f"{number:020}", None)
    numbers = itertools.count(num_buried)

    def bury_and_ask() -> None:
        tombstones.bury(f"{next(numbers):020}", None)
        tombstones.covers("unknown", 1)

    return cpu_us(bury_and_ask, 1_000)


def _trace_us(num_traced: int) -> float:
    trace = TraceRecorder("bench", "bench-0", TraceLevel.REQUESTS, lambda event: None)
    for number in range(num_traced):
        trace.record(f"{number:020}", "queued")
    numbers = itertools.count(num_traced)
    return cpu_us(lambda: trace.record(f"{next(numbers):020}", "queued", prompt_tokens=7), 1_000)


# ---------------------------------------------------------------- stages


def _announced(kind: str, index: int) -> Announcement:
    return Announcement(kind, index, f"{kind}-{index}", "there", 1, StageState.READY, load={"requests": float(index)})


def _directory_us(num_stages: int) -> tuple[float, float, float]:
    directory = Directory(Versions(), Timings())
    said = [_announced(KINDS[number % len(KINDS)], number // len(KINDS)) for number in range(num_stages)]
    for each in said:
        directory.hear(each, 0.0)
    heartbeats = itertools.cycle(said)
    hear_us = cpu_us(lambda: directory.hear(next(heartbeats), 0.5), 1_000)
    choose_us = cpu_us(lambda: pick(directory.usable("scheduler"), {}), 1_000)
    return hear_us, choose_us, cpu_us(lambda: directory.tick(1.0), 100)
