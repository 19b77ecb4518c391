"""Keeps the actors of one process running.

Owns: restarting a stateless actor in place, with backoff and a limit; ending the process when an actor that holds an
engine fails, or when another instance supersedes one.
Does not know: stages; processes (`topology/supervise.py` restarts those).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

import anyio
import msgspec

from busllm.actors.actor import Actor
from busllm.actors.clock import Clock, Timings
from busllm.errors import BusPermissionDenied, Superseded
from busllm.telemetry.logging import get_logger


class ActorPlan(msgspec.Struct, frozen=True):
    """One actor to be kept running.

    Attributes:
        name: for the log.
        make: builds a fresh actor (a new instance name) for every start.
        restarts_in_place: False when its failure must end the process.
        drains_with: those with the same word, side by side in the list, drain together; None = it drains alone.
    """

    name: str
    make: Callable[[], Actor]
    restarts_in_place: bool
    drains_with: str | None = None


def _is_final(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_final(inner) for inner in error.exceptions)
    return isinstance(error, (Superseded, BusPermissionDenied))


class Supervisor:
    """Runs actors until told to stop, then drains them in the order of the list (the path of a request)."""

    def __init__(self, plans: tuple[ActorPlan, ...], clock: Clock, timings: Timings) -> None:
        self._plans = plans
        self._clock = clock
        self._timings = timings
        self._running: dict[str, Actor] = {}
        self._ended: dict[str, anyio.Event] = {plan.name: anyio.Event() for plan in plans}
        self._stopping = False
        self._log = get_logger("busllm.supervisor")

    @property
    def actors(self) -> dict[str, Actor]:
        """The actors that run now, by plan name."""
        return dict(self._running)

    async def run(self, stop: anyio.Event, *, hurry: anyio.Event | None = None) -> None:
        """Runs all actors until `stop` is set and they have drained.

        Args:
            stop: begins the drain.
            hurry: cuts it short, of those that drain and of those whose turn has not come.

        Raises:
            ExceptionGroup: an actor failed for good; holds its error.
        """
        async with anyio.create_task_group() as tasks:
            for plan in self._plans:
                tasks.start_soon(self._keep, plan)
            await stop.wait()
            self._stopping = True
            if hurry is not None:
                tasks.start_soon(self._hurry_all, hurry)
            for _, together in groupby(self._plans, key=lambda plan: plan.drains_with or plan.name):
                await self._drain([plan.name for plan in together])
            tasks.cancel_scope.cancel()

    async def _drain(self, names: Sequence[str]) -> None:
        running = {name: self._running[name] for name in names if name in self._running}
        for actor in running.values():
            actor.stop()
        for name in running:
            await self._ended[name].wait()

    async def _hurry_all(self, hurry: anyio.Event) -> None:
        await hurry.wait()
        for actor in self._running.values():
            actor.hurry()

    async def _keep(self, plan: ActorPlan) -> None:
        failures: deque[float] = deque()
        while not self._stopping:
            actor = self._running[plan.name] = plan.make()
            try:
                await actor.run()
                break
            except Exception as error:
                if _is_final(error) or not plan.restarts_in_place:
                    raise
                self._note_failure(plan, failures, error)
            backoff_s = min(self._timings.restart_backoff_s * 2 ** len(failures), self._timings.restart_backoff_max_s)
            await self._clock.sleep(backoff_s)
        self._running.pop(plan.name, None)
        self._ended[plan.name].set()

    def _note_failure(self, plan: ActorPlan, failures: deque[float], error: Exception) -> None:
        now = self._clock.monotonic()
        failures.append(now)
        while failures[0] < now - self._timings.restart_window_s:
            failures.popleft()
        self._log.error("actor_failed", stage=plan.name, restarts=len(failures), exc_info=error)
        if len(failures) > self._timings.restart_limit:
            raise error
