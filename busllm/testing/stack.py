"""The whole path of a request in one process, without HTTP: an owner, tokenizers, schedulers, detokenizers on any bus.

Owns: starting and stopping the actors, and ending one of them as a kill would: without a word.
Does not know: processes and the command line (`tests/end_to_end` starts those for real).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.abc
import msgspec

from busllm.actors.actor import Actor, ActorSettings
from busllm.actors.behaviour import Behaviour
from busllm.actors.clock import SystemClock, Timings
from busllm.bus.protocol import Bus, ConnectionClosed
from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.null import NullRunner
from busllm.engine.parallel.group import Alone
from busllm.engine.parallel.runner import ParallelRunner
from busllm.engine.parallel.shard import Shard
from busllm.engine.parallel.worker import RankWorker
from busllm.engine.runner import Runner
from busllm.errors import BusllmError, EngineError
from busllm.messages.to_tokenizer import TextPrompt
from busllm.model_store.description import NULL_EOS_TOKEN_ID, NULL_MAX_CONTEXT_TOKENS, NULL_VOCAB_SIZE
from busllm.requests.generation import GenerationRequest
from busllm.requests.owner import RequestOwner
from busllm.requests.owner_behaviour import OwnerBehaviour
from busllm.sampling import SamplingParams
from busllm.stages.detokenizer.stage import DetokenizerStage
from busllm.stages.rank.build_part import RankPart
from busllm.stages.rank.stage import RankStage
from busllm.stages.scheduler.leading_stage import LeadingSchedulerStage
from busllm.stages.scheduler.rank_leader import RankLeader
from busllm.stages.scheduler.stage import SchedulerStage
from busllm.stages.tokenizer import TokenizerStage
from busllm.telemetry.trace import TraceLevel
from busllm.testing.null_engine import null_grammars
from busllm.text.null_tokenizer import NullTokenizer

FAST_TIMINGS = Timings(
    heartbeat_s=0.05,
    suspect_s=0.4,
    gone_s=1.0,
    taken_s=0.5,
    silence_s=0.3,
    strike_s=0.1,
    probe_timeout_s=0.5,
    tick_s=0.02,
    settle_s=0.15,
    first_stage_s=0.5,
    resume_deadline_s=10.0,
    drain_timeout_s=5.0,
)
# For replicas of several ranks, which end when one is taken for gone: a busy machine must not look like a dead rank.
PATIENT_TIMINGS = msgspec.structs.replace(FAST_TIMINGS, gone_s=4.0)


class StackConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    Attributes:
        tokenizers, schedulers, detokenizers: how many of each.
        ranks: per scheduler.
        step_time_s: of the null engine.
        engine: sizes of each engine.
        timings: short, so that a test of a fault does not wait for long.
        cluster: second token of every subject.
    """

    tokenizers: int = 1
    schedulers: int = 1
    ranks: int = 1
    detokenizers: int = 1
    step_time_s: float = 0.001
    engine: EngineConfig = EngineConfig(num_pages=4096, max_running=64, max_context_tokens=100_000)
    timings: Timings = FAST_TIMINGS
    cluster: str = "test"
    trace_level: TraceLevel = TraceLevel.REQUESTS
    max_queued: int = 10_000


class Stack:
    """Running actors by name (`tokenizer:0`, …) and the owner of requests.

    Attributes:
        actors: the latest of each name.
        owner: of requests.
        failures: errors by which replicas of several ranks have ended, by name.
    """

    def __init__(self, bus: Bus, config: StackConfig, tasks: anyio.abc.TaskGroup) -> None:
        self._bus = bus
        self._config = config
        self._tasks = tasks
        self._scopes: dict[str, anyio.CancelScope] = {}
        self.actors: dict[str, Actor] = {}
        self.failures: dict[str, BusllmError] = {}
        self.owner = RequestOwner(max_queued=config.max_queued)

    async def start(self, name: str) -> Actor:
        """Starts a stage (again) and waits until it is ready."""
        kind, _, index = name.partition(":")
        settings = ActorSettings(
            cluster=self._config.cluster,
            host="here",
            timings=self._config.timings,
            trace_level=self._config.trace_level,
        )
        actor = Actor(self._behaviour(kind, int(index)), int(index), self._bus, settings, SystemClock())
        self.actors[name] = actor
        scope = self._scopes[name] = anyio.CancelScope()
        self._tasks.start_soon(self._run, name, actor, scope)
        await actor.ready.wait()
        return actor

    async def kill(self, name: str) -> None:
        """Ends a stage without a word, as SIGKILL does; nobody is told."""
        self._scopes[name].cancel()
        await self.actors[name].connection.close()  # before the actor, which is cancelled, can say that it goes

    async def wait_until_ready(self) -> None:
        """Waits until a request would be served."""
        await self.wait_for(lambda: self.owner.unready_reason() is None)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition that actors bring about holds."""
        while not condition():
            await anyio.sleep(self._config.timings.tick_s)

    async def generate(self, prompt: str, *, max_tokens: int = 32, **sampling: Any) -> str:
        """The text of one request, read to its end."""
        live = self.owner.submit(request(prompt, max_tokens=max_tokens, **sampling))
        text = ""
        async for deltas in live:
            text += "".join(delta.text for delta in deltas)
        return text

    async def _run(self, name: str, actor: Actor, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                await actor.run()
            except* ConnectionClosed:
                if not scope.cancel_called:  # else it was killed, and saw its connection go first
                    raise
            except* EngineError as group:
                if self._config.ranks == 1:
                    raise
                self.failures[name] = only_error(group)

    def _behaviour(self, kind: str, index: int) -> Behaviour:
        match kind:
            case "owner":
                return OwnerBehaviour("client", self.owner, is_unique=False)
            case "tokenizer":
                return TokenizerStage(NullTokenizer, NULL_MAX_CONTEXT_TOKENS, NULL_VOCAB_SIZE, (NULL_EOS_TOKEN_ID,))
            case "detokenizer":
                return DetokenizerStage(NullTokenizer)
            case "scheduler":
                return self._scheduler(index)
            case "rank":
                replica, rank = divmod(index, self._config.ranks)
                return RankStage(replica, rank, partial(self._make_part, rank))
            case _:
                raise ValueError(f"there is no stage kind {kind!r}")

    def _scheduler(self, index: int) -> SchedulerStage:
        if self._config.ranks == 1:
            return SchedulerStage(partial(self._make_engine, None))
        leader = RankLeader(index, self._config.ranks)
        return LeadingSchedulerStage(partial(self._make_engine, leader), leader)

    def _make_engine(self, leader: RankLeader | None) -> Engine:
        grammars = null_grammars()
        runner: Runner = NullRunner(step_time_s=self._config.step_time_s, grammars=grammars)
        if leader is not None:
            group = Alone(Shard(0, self._config.ranks))
            leader.gather(group, None, runner.model.fingerprint)
            runner = ParallelRunner(runner, leader, group)
        return Engine(runner, self._config.engine, grammars)

    def _make_part(self, rank: int) -> RankPart:
        group = Alone(Shard(rank, self._config.ranks))
        runner = NullRunner(step_time_s=self._config.step_time_s, grammars=null_grammars())
        return RankPart(RankWorker(runner, group), group, lambda host, port, epoch: None)


def only_error(group: BaseException) -> BusllmError:
    """The first error in a group."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    assert isinstance(group, BusllmError)
    return group


def request(prompt: str, *, max_tokens: int = 32, n: int = 1, **sampling: Any) -> GenerationRequest:
    """A request for one text prompt."""
    params = SamplingParams(max_tokens=max_tokens, **({"seed": 7} | sampling))
    return GenerationRequest((TextPrompt(prompt),), params, n=n)


@asynccontextmanager
async def running_stack(bus: Bus, config: StackConfig | None = None) -> AsyncIterator[Stack]:
    """Runs a stack until the block ends."""
    config = config or StackConfig()
    async with anyio.create_task_group() as tasks:
        stack = Stack(bus, config, tasks)
        for number in range(config.schedulers * config.ranks):
            if number % config.ranks:
                tasks.start_soon(stack.start, f"rank:{number}")  # ready only with its scheduler
        for kind, count in (
            ("detokenizer", config.detokenizers),
            ("scheduler", config.schedulers),
            ("tokenizer", config.tokenizers),
            ("owner", 1),
        ):
            for index in range(count):
                await stack.start(f"{kind}:{index}")
        await stack.wait_until_ready()
        try:
            yield stack
        finally:
            tasks.cancel_scope.cancel()
