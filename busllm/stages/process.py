"""One process of a cluster: the stages that a command line names, on the bus of a topology.

Owns: the wiring of stages, actors and supervisor; signals; the exit status.
Does not know: how processes are placed and restarted (`topology/`), what each stage is given (`build.py`).
Next on the path: `actors/supervisor.py` keeps the stages running.

Exit status: 0 after a drain, 1 when a stage failed for good, 2 when starting again would not help (a wrong topology, a
model that cannot be served, a package that is not installed), 3 when a live older instance has
the same place.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import anyio
import anyio.abc
import msgspec
import structlog

from busllm.actors.actor import Actor
from busllm.actors.behaviour import Behaviour
from busllm.actors.clock import Clock, SystemClock
from busllm.actors.settings import ActorSettings
from busllm.actors.supervisor import ActorPlan, Supervisor
from busllm.bus.protocol import Bus
from busllm.errors import BusllmError, ConfigError, MissingPackage, ModelError, Superseded
from busllm.precedence import give_way
from busllm.stages.build import StageBuilder
from busllm.stages.frontend.stage import FrontendStage
from busllm.telemetry.logging import configure_logging, get_logger
from busllm.topology.address import bind, parse_address
from busllm.topology.config import STAGE_KINDS, Topology
from busllm.topology.last_words import say_last_words
from busllm.topology.open_bus import open_topology_bus
from busllm.topology.placement import StageId
from busllm.topology.ranks import announced_place

EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_SUPERSEDED = 0, 1, 2, 3
ENGINE_SWITCH_INTERVAL_S = 1e-4  # the engine's thread gets the interpreter back soon from a busy event loop


class _Shared(msgspec.Struct, frozen=True):
    """What all actors of the process are made with."""

    bus: Bus
    settings: ActorSettings
    clock: Clock

    def actor(self, behaviour: Behaviour, index: int) -> Actor:
        return Actor(behaviour, index, self.bus, self.settings, self.clock)


class StageProcess:
    """The stages of this process."""

    def __init__(
        self, topology: Topology, stages: Sequence[StageId], bus_url: str | None, listen_fds: Mapping[int, int]
    ) -> None:
        self._topology = topology
        self._stages = sorted(stages, key=lambda stage: (STAGE_KINDS.index(stage.kind), stage.index, stage.rank))
        self._bus_url = bus_url
        self._listen_fds = listen_fds
        self._builder = StageBuilder(topology, bus_url)
        self._stop = anyio.Event()
        self._hurry = anyio.Event()

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT and the drain that follows; a second signal hurries."""
        if any(stage.kind == "scheduler" for stage in self._stages):
            sys.setswitchinterval(ENGINE_SWITCH_INTERVAL_S)
        bus = open_topology_bus(self._topology.bus, self._bus_url)
        shared = _Shared(bus, self._builder.actor_settings(), SystemClock())
        frontends = {stage: self._frontend(stage) for stage in self._stages if stage.kind == "frontend"}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen_to_signals)
            for frontend in frontends.values():
                await tasks.start(frontend.serve_http, self._hurry)
            plans = tuple(self._plan(stage, frontends.get(stage), shared, tasks) for stage in self._stages)
            await Supervisor(plans, shared.clock, shared.settings.timings).run(self._stop, hurry=self._hurry)
            for frontend in frontends.values():
                await frontend.stop_http()
            tasks.cancel_scope.cancel()

    def _plan(
        self, stage: StageId, frontend: FrontendStage | None, shared: _Shared, tasks: anyio.abc.TaskGroup
    ) -> ActorPlan:
        def make() -> Actor:
            behaviour = frontend if frontend is not None else self._builder.behaviour(stage)
            _, index = announced_place(self._topology, stage)
            actor = shared.actor(behaviour, index)
            tasks.start_soon(_spare_collections, actor)
            return actor

        # A frontend's sockets and an engine's memory belong to the process: with them the process ends.
        return ActorPlan(
            str(stage),
            make,
            restarts_in_place=stage.kind in ("tokenizer", "detokenizer"),
            # The ranks of a replica need each other until the end, and take an end that they do not share for a fault.
            drains_with=f"replica {stage.index}" if stage.kind == "scheduler" else None,
        )

    def _frontend(self, stage: StageId) -> FrontendStage:
        fd = self._listen_fds.get(stage.index)
        if fd is not None:
            return self._builder.frontend([socket.socket(fileno=os.dup(fd))])
        return self._builder.frontend([bind(parse_address(self._topology.listen_of(stage.index)))])

    async def _listen_to_signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                if self._stop.is_set():
                    self._hurry.set()
                self._stop.set()


async def _spare_collections(actor: Actor) -> None:
    """Takes what loading made out of garbage collection for good.

    Much of it is imported code. To look at all of it takes an engine's process a tenth of a second, in the middle of
    some step.
    """
    await actor.ready.wait()
    gc.freeze()


def run_stages(
    topology: Topology,
    stages: Sequence[StageId],
    *,
    bus_url: str | None,
    listen_fds: Mapping[int, int],
    topology_file: str | None,
) -> int:
    """Runs stages in this process until a signal drains them.

    Args:
        topology: the whole cluster.
        stages: which of its stages run here.
        bus_url: with its secret; None for a memory bus.
        listen_fds: inherited listening sockets by frontend index; a frontend without one binds its own.
        topology_file: for error messages.

    Returns:
        The exit status.
    """
    configure_logging(os.environ.get("BUSLLM_LOG_LEVEL", "info"))
    give_way()
    log = get_logger("busllm.process", stages=[str(stage) for stage in stages])
    status = EXIT_OK
    try:
        process = StageProcess(topology, stages, bus_url, listen_fds)
        anyio.run(process.run, backend_options={"use_uvloop": True})
    except* Superseded as group:
        _tell(log, "superseded", group)
        status = EXIT_SUPERSEDED
    except* (ConfigError, ModelError, MissingPackage) as group:  # starting again would not help
        _tell(log.bind(file=topology_file), "cannot_start", group)
        status = EXIT_CONFIG
    except* BusllmError as group:
        _tell(log, "failed", group)
        status = EXIT_FAILED
        if any(stage.kind == "scheduler" for stage in stages):
            _leave_at_once(status)
    return status


def _leave_at_once(status: int) -> NoReturn:
    """Ends the process without the interpreter's farewell, for which an engine's thread may never be ready."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _tell(log: structlog.stdlib.BoundLogger, event: str, group: BaseException) -> None:
    """Says why this process ends: to the log, and to `busllm up`."""
    reason = _first(group)
    log.error(event, reason=reason)
    say_last_words(reason)


def _first(group: BaseException) -> str:
    """The message of the first error in a group."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return str(group)
