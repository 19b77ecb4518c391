"""A replica of several ranks around the null engine: one plan for all, one end for all, gaps that are only pauses."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from busllm.actors.actor import Actor
from busllm.actors.clock import SystemClock
from busllm.actors.settings import ActorSettings
from busllm.bus.memory import MemoryBus
from busllm.bus.protocol import Message
from busllm.bus.subjects import Subjects
from busllm.engine.null import NullRunner
from busllm.engine.parallel.group import Alone
from busllm.engine.parallel.shard import Shard
from busllm.engine.parallel.worker import RankWorker
from busllm.messages.codec import encode, encode_json
from busllm.messages.control import Announcement, StageState
from busllm.messages.to_ranks import Allocate, OrderTaken, Step, taken_decoder
from busllm.plan import StepPlan
from busllm.sampling import Grammar, GrammarKind
from busllm.stages.rank.build_part import RankPart
from busllm.stages.rank.stage import RankStage
from busllm.testing.faulty_bus import FaultyBus
from busllm.testing.stack import PATIENT_TIMINGS, Stack, StackConfig, request, running_stack
from tests.requests.test_sending_on import Reader, idle, undisturbed

pytestmark = pytest.mark.anyio

PATIENCE_S = 30.0


def ranked(num_ranks: int, schedulers: int = 1) -> StackConfig:
    return StackConfig(schedulers=schedulers, ranks=num_ranks, timings=PATIENT_TIMINGS)


@pytest.mark.parametrize("num_ranks", [2, 3])
async def test_all_ranks_take_part_in_every_step(num_ranks: int) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(MemoryBus(), ranked(num_ranks)) as stack:
            assert await stack.generate("hello", max_tokens=200) == undisturbed("hello")
            await idle(stack)
            steps = stack.actors["scheduler:0"].announcement().statistics["steps"]
            for rank in range(1, num_ranks):
                actor = stack.actors[f"rank:{rank}"]
                await stack.wait_for(lambda actor=actor: actor.announcement().statistics["steps"] == steps)


async def test_an_answer_of_several_ranks_keeps_to_its_grammar() -> None:
    digits = Grammar(GrammarKind.REGEX, "[0-9]{3}(-[0-9]{3}){5}")
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(MemoryBus(), ranked(2)) as stack:
            assert re.fullmatch(digits.text, await stack.generate("hello", max_tokens=200, grammar=digits))
            assert not stack.failures


async def test_two_replicas_keep_their_ranks_apart() -> None:
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(MemoryBus(), ranked(2, schedulers=2)) as stack:
            for index in (1, 3):
                status = stack.actors[f"rank:{index}"].announcement().statistics
                assert status["leader"] == stack.actors[f"scheduler:{index // 2}"].instance
                assert (status["replica"], status["rank"]) == (index // 2, 1)
            assert await stack.generate("hello", max_tokens=200) == undisturbed("hello")


@asynccontextmanager
async def reading(stack: Stack, prompts: list[str]) -> AsyncIterator[Reader]:
    """Reads requests that are under way when the block begins, to their ends."""
    reader = Reader()
    async with anyio.create_task_group() as readers:
        for prompt in prompts:
            readers.start_soon(reader.read, prompt, stack.owner.submit(request(prompt, max_tokens=200)))
        await stack.wait_for(lambda: all(reader.texts.get(prompt) for prompt in prompts))
        yield reader
    assert reader.texts == {prompt: undisturbed(prompt) for prompt in prompts}
    assert not reader.errors


@pytest.mark.parametrize("outage_s", [0.1, 1.5])
async def test_a_gap_on_the_bus_is_a_pause_and_no_end(outage_s: float) -> None:
    bus = FaultyBus()
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(bus, ranked(2)) as stack:
            before = {name: stack.actors[name].instance for name in ("scheduler:0", "rank:1")}
            async with reading(stack, ["one", "two", "three"]):
                bus.cut()
                await anyio.sleep(outage_s)
                bus.mend()
            assert not stack.failures
            assert {name: stack.actors[name].instance for name in before} == before
            await idle(stack)


@pytest.mark.parametrize("gone", ["rank:1", "rank:2", "scheduler:0"])
async def test_a_replica_ends_as_a_whole_with_the_reason_and_its_requests_go_on(gone: str) -> None:
    names = ["rank:1", "rank:2", "scheduler:0"]
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(MemoryBus(), ranked(3)) as stack:
            async with reading(stack, ["one", "two", "three"]):
                instance = stack.actors[gone].instance
                await stack.kill(gone)
                await stack.wait_for(lambda: set(stack.failures) == set(names) - {gone})
                async with anyio.create_task_group() as tasks:  # as `up` would
                    for name in names:
                        tasks.start_soon(stack.start, name)
            told = [error.message for error in stack.failures.values()]
            assert any(instance in message for message in told)
            assert all(message.startswith("The replica ends:") for message in told)
            await idle(stack)


async def test_a_stopped_rank_drains_its_replica() -> None:
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(MemoryBus(), ranked(2)) as stack:
            scheduler, rank = stack.actors["scheduler:0"], stack.actors["rank:1"]
            rank.stop()
            known = stack.actors["owner:0"].directory
            await stack.wait_for(lambda: known.get(scheduler.instance) is None and known.get(rank.instance) is None)
            assert not stack.failures


async def test_rank_0_waits_for_a_rank_with_the_same_model() -> None:
    bus = MemoryBus()
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(bus, ranked(2)) as stack:
            await stack.kill("rank:1")
            await stack.wait_for(lambda: "scheduler:0" in stack.failures)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stack.start, "scheduler:0")
                await stack.wait_for(lambda: progress(stack, "scheduler:0") == "waiting for rank 1")
                other = rank_actor(bus, stack, NullRunner(max_context_tokens=77))
                tasks.start_soon(other.run)
                await stack.wait_for(lambda: other.announcement().statistics["leader"] is not None)
                assert progress(stack, "scheduler:0") == "waiting for rank 1"
                tasks.cancel_scope.cancel()


def progress(stack: Stack, name: str) -> str:
    return stack.actors[name].announcement().progress


def rank_actor(bus: MemoryBus, stack: Stack, runner: NullRunner) -> Actor:
    actor = stack.actors["owner:0"]
    part = RankPart(RankWorker(runner, Alone(Shard(1, 2))), Alone(Shard(1, 2)), lambda host, port, epoch: None)
    return Actor(RankStage(0, 1, lambda: part), 1, bus, actor.settings, SystemClock())


# ---------------------------------------------------------------- one rank, rank 0 played by the test

LEADER = "scheduler-0-aaaaaaaa"
SUBJECTS = Subjects("test")
ALLOCATE = Allocate(0, num_pages=8, page_tokens=4, max_running=2, max_context_tokens=32)
STEP = Step(1, StepPlan(1, (), 0))


class Played:
    """Rank 0 as the test plays it."""

    def __init__(self, rank: Actor, connection: Any) -> None:
        self.rank = rank
        self.connection = connection

    async def announce(self, **meeting: Any) -> None:
        statistics = {"ranks": {"size": 2, **meeting}}
        announced = Announcement("scheduler", 0, LEADER, "there", 1, StageState.STARTING, statistics=statistics)
        self.connection.publish(SUBJECTS.stage("scheduler", LEADER), encode_json(announced))

    async def meet(self) -> None:
        await self.announce(open=True)
        await self.rank.ready.wait()

    def statistics(self) -> dict[str, Any]:
        return self.rank.announcement().statistics

    async def order(self, order: Allocate | Step) -> None:
        self.connection.publish(SUBJECTS.plan(LEADER), encode(order), "inbox.played.order")

    async def answers(self, number: int) -> list[OrderTaken]:
        found: list[OrderTaken] = []
        while len(found) < number:
            found += [
                taken_decoder.decode(item.payload)
                for item in await self.connection.receive()
                if isinstance(item, Message)
            ]
        return found


@asynccontextmanager
async def one_rank() -> AsyncIterator[Played]:
    """A rank that looks for its rank 0."""
    bus = MemoryBus()
    group = Alone(Shard(1, 2))
    part = RankPart(RankWorker(NullRunner(check_plans=False), group), group, lambda host, port, epoch: None)
    settings = ActorSettings(cluster="test", host="here", timings=PATIENT_TIMINGS)
    actor = Actor(RankStage(0, 1, lambda: part), 1, bus, settings, SystemClock())
    connection = await bus.connect(name="played", inbox="inbox.played")
    await connection.subscribe("inbox.played.order")
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.run)
            while actor.announcement().progress != "waiting for rank 0":
                await anyio.sleep(0.01)
            yield Played(actor, connection)
            tasks.cancel_scope.cancel()


async def test_an_order_that_comes_twice_is_executed_once_and_acknowledged_twice() -> None:
    async with one_rank() as played:
        await played.meet()
        for order in (ALLOCATE, STEP, STEP, ALLOCATE):
            await played.order(order)
        assert [taken.number for taken in await played.answers(4)] == [0, 1, 1, 0]
        while played.statistics()["steps"] != 1:
            await anyio.sleep(0.01)


async def test_an_order_before_which_one_is_missing_waits_to_be_sent_again() -> None:
    async with one_rank() as played:
        await played.meet()
        for order in (STEP, ALLOCATE, STEP):
            await played.order(order)
        assert [taken.number for taken in await played.answers(2)] == [0, 1]


async def test_a_rank_comes_to_no_meeting_that_is_closed() -> None:
    async with one_rank() as played:
        await played.announce(open=False)
        while not played.rank.directory.peers():
            await anyio.sleep(0.01)
        assert played.statistics()["leader"] is None
        await played.meet()
        assert played.statistics()["leader"] == LEADER
