"""Actors that fail are started again in place, within limits; the others end what holds them."""

from __future__ import annotations

import anyio
import pytest

from busllm.actors.actor import Actor
from busllm.actors.clock import Timings
from busllm.actors.supervisor import ActorPlan, Supervisor
from busllm.bus.memory import MemoryBus
from busllm.errors import EngineError, Superseded
from busllm.testing.clock import ManualClock, settle
from busllm.topology.restarts import RestartTimings
from tests.actors.recording import Recording, make_actor

pytestmark = pytest.mark.anyio

TIMINGS = Timings(restart_limit=3, restart_window_s=60.0, restart_backoff_s=0.1, restart_backoff_max_s=2.0)
LONG_S = 5.0


class Factory:
    """Makes actors that fail as often as they are told to.

    Attributes:
        made: every behaviour so far.
    """

    def __init__(self, clock: ManualClock, failures: list[Exception], kind: str = "tokenizer") -> None:
        self._clock = clock
        self._failures = list(failures)
        self._kind = kind
        self._bus = MemoryBus()
        self.made: list[Recording] = []

    def __call__(self) -> Actor:
        behaviour = Recording(self._kind, self._failures.pop(0) if self._failures else None)
        behaviour.may_start.set()
        behaviour.may_end.set()
        self.made.append(behaviour)
        return make_actor(behaviour, self._bus, self._clock)

    def plan(self, *, restarts_in_place: bool = True, drains_with: str | None = None) -> ActorPlan:
        return ActorPlan(self._kind, self, restarts_in_place, drains_with)


def is_in(group: BaseException, error: Exception) -> bool:
    if isinstance(group, BaseExceptionGroup):
        return any(is_in(inner, error) for inner in group.exceptions)
    return group is error


async def test_a_failed_actor_is_started_again_under_a_new_name() -> None:
    clock, stop = ManualClock(), anyio.Event()
    factory = Factory(clock, [RuntimeError("one"), RuntimeError("two")])
    supervisor = Supervisor((factory.plan(),), clock, TIMINGS)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run, stop)
        await settle()
        assert len(factory.made) == 1, "it waits before the next start"
        await clock.advance(LONG_S)
        assert len(factory.made) == 3
        assert len({behaviour.actor.instance for behaviour in factory.made}) == 3
        assert supervisor.actors["tokenizer"] is factory.made[-1].actor
        stop.set()


async def test_too_many_failures_in_a_row_end_it_with_the_last_one() -> None:
    clock = ManualClock()
    failures = [RuntimeError(str(number)) for number in range(10)]
    factory = Factory(clock, list(failures))
    with pytest.raises(ExceptionGroup) as raised:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Supervisor((factory.plan(),), clock, TIMINGS).run, anyio.Event())
            await clock.advance(4 * LONG_S)
    assert len(factory.made) == TIMINGS.restart_limit + 1
    assert is_in(raised.value, failures[TIMINGS.restart_limit])


async def test_failures_far_apart_do_not_add_up() -> None:
    timings = Timings(restart_limit=2, restart_window_s=1.5, restart_backoff_s=0.1, restart_backoff_max_s=0.2)
    clock, stop = ManualClock(), anyio.Event()
    factory = Factory(clock, [RuntimeError(str(number)) for number in range(timings.restart_limit)])
    supervisor = Supervisor((factory.plan(),), clock, timings)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run, stop)
        for _ in range(timings.restart_limit):
            await clock.advance(2 * timings.restart_window_s)
            factory.made[-1].actor.tasks.start_soon(fail)
        await clock.advance(1.0)
        assert len(factory.made) == 2 * timings.restart_limit + 1
        stop.set()


async def fail() -> None:
    raise RuntimeError("much later")


async def test_an_actor_that_holds_an_engine_ends_everything_at_its_first_failure() -> None:
    clock, error = ManualClock(), EngineError("the engine failed")
    factory, neighbour = Factory(clock, [error], "scheduler"), Factory(clock, [])
    plans = (neighbour.plan(), factory.plan(restarts_in_place=False))
    with pytest.raises(ExceptionGroup) as raised:
        await Supervisor(plans, clock, TIMINGS).run(anyio.Event())
    assert is_in(raised.value, error)
    assert len(factory.made) == 1


async def test_a_superseded_actor_is_not_started_again() -> None:
    clock, error = ManualClock(), Superseded("another one lives")
    factory = Factory(clock, [error])
    with pytest.raises(ExceptionGroup) as raised:
        await Supervisor((factory.plan(),), clock, TIMINGS).run(anyio.Event())
    assert is_in(raised.value, error)
    assert len(factory.made) == 1


def test_a_request_that_ends_its_holders_is_given_up_before_their_process_is() -> None:
    timings = Timings()
    num_killed = timings.max_holders_lost + 1
    assert num_killed < timings.restart_limit, "the actor is restarted after the last one"
    assert num_killed < RestartTimings().limit, "so is the process"


async def test_hurry_cuts_all_drains_short_those_to_come_too() -> None:
    """The limit is on the event loop's clock; the drains themselves would wait for ever."""
    clock, stop, hurry = ManualClock(), anyio.Event(), anyio.Event()
    factories = Factory(clock, []), Factory(clock, [], "detokenizer")
    supervisor = Supervisor(tuple(factory.plan() for factory in factories), clock, Timings())
    with anyio.fail_after(LONG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: supervisor.run(stop, hurry=hurry))
            await settle()
            for factory in factories:
                factory.made[0].may_end = anyio.Event()
            stop.set()
            await settle()
            assert all(factory.made[0].actor.connection.is_connected for factory in factories)
            hurry.set()
    assert not any(factory.made[0].actor.connection.is_connected for factory in factories)


async def test_actors_are_drained_in_the_order_of_the_path() -> None:
    clock, stop = ManualClock(), anyio.Event()
    first, second = Factory(clock, []), Factory(clock, [], "detokenizer")
    supervisor = Supervisor((first.plan(), second.plan()), clock, TIMINGS)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run, stop)
        await settle()
        (held,) = first.made
        held.may_end = anyio.Event()
        stop.set()
        await settle()
        assert second.made[0].actor.connection.is_connected, "the second serves while the first drains"
        held.may_end.set()


async def test_actors_that_need_each_other_drain_together() -> None:
    clock, stop = ManualClock(), anyio.Event()
    first, second, after = Factory(clock, []), Factory(clock, [], "rank"), Factory(clock, [], "detokenizer")
    plans = (first.plan(drains_with="replica 0"), second.plan(drains_with="replica 0"), after.plan())
    supervisor = Supervisor(plans, clock, TIMINGS)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run, stop)
        await settle()
        (held,) = first.made
        held.may_end = anyio.Event()
        stop.set()
        await settle()
        assert "rank" not in supervisor.actors, "it drained beside the first"
        assert "detokenizer" in supervisor.actors
        held.may_end.set()
