"""`busllm up`: the parent of one host's processes.

Owns: the order of a start (lock, listen, prepare, bus server, processes) and of an end (frontends, the others, the bus
server), signals, the state file, the ready line.
Does not know: what stages do: it runs none, and imports neither torch nor a tokenizer.
Next on the path: `supervise.py` for the processes, `watch.py` for what they say.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.abc
import msgspec

from busllm.bus.nats_server import EmbeddedNatsServer, NatsServerOptions
from busllm.bus.protocol import Bus
from busllm.bus.subjects import Subjects
from busllm.errors import BusPermissionDenied, ConfigError
from busllm.messages.control import Announcement
from busllm.precedence import give_way
from busllm.telemetry.logging import get_logger
from busllm.topology.bus_keeper import keep_bus_server
from busllm.topology.child import ChildCommand, stage_command
from busllm.topology.config import Topology
from busllm.topology.die_with_parent import wrapper_command
from busllm.topology.heartbeats import Heartbeats
from busllm.topology.listeners import Listeners, listening
from busllm.topology.nearest import nearest
from busllm.topology.open_bus import open_topology_bus
from busllm.topology.placement import PlacedProcess, place
from busllm.topology.ranks import announced_place
from busllm.topology.ready import wait_until_ready, watch_health
from busllm.topology.state import MEMORY, RunningCluster, StateFiles
from busllm.topology.supervise import (
    EXIT_FAILURE,
    SupervisedProcess,
    SupervisionTimings,
    Supervisor,
    Verdict,
)
from busllm.topology.watch import Watch

FRONTEND_GRACE_S = 10.0  # beyond the frontends' own drain timeout

CommandFor = Callable[[PlacedProcess, str | None, Listeners], ChildCommand]


class UpOptions(msgspec.Struct, frozen=True):
    """How to run one host of a cluster.

    Attributes:
        topology: the whole cluster.
        host: which of its hosts this is.
        topology_text: the text of the topology file; None = the built-in one.
        timings: of supervision.
        command_for: makes the command of a process; None = `busllm stage`.
    """

    topology: Topology
    host: str
    topology_text: str | None = None
    timings: SupervisionTimings = SupervisionTimings()
    command_for: CommandFor | None = None


def run_up(options: UpOptions, prepare: Callable[[], None]) -> int:
    """Starts everything that is placed on this host, keeps it running, drains it on SIGTERM or SIGINT.

    Args:
        options: what to run.
        prepare: called when nobody else runs this and the addresses are bound, before anything is started.

    Returns:
        The exit status.

    Raises:
        ConfigError: nothing is placed on this host.
        AlreadyRunning: another `up` of this cluster and host runs.
        AddressUnavailable: a frontend's address cannot be bound.
        BusError: the bus server does not start.
    """
    topology = options.topology
    processes = processes_of(topology, options.host)
    files = StateFiles(topology.cluster, options.host)
    with files.locked(), listening(topology, processes) as listeners:
        prepare()
        give_way()  # the bus server and the stages inherit it
        text = options.topology_text
        topology_file = None if text is None else str(files.keep_topology(text))
        run = _HostRun(options, processes, files, listeners, topology_file)
        return anyio.run(run.run)


def processes_of(topology: Topology, host: str) -> list[PlacedProcess]:
    """The processes of one host.

    Raises:
        ConfigError: there are none.
    """
    everywhere = place(topology, host)
    here = [placed for placed in everywhere if placed.host == host]
    if not here:
        hosts = sorted({placed.host for placed in everywhere})
        raise ConfigError(
            f"no process is placed on host {host!r}; the file names {', '.join(hosts)}. Choose one with --host.",
            key="process.host",
            suggestion=nearest(host, hosts),
        )
    return here


class _HostRun:
    """One run of `up`, from the bus server's start to its end."""

    def __init__(
        self,
        options: UpOptions,
        processes: Sequence[PlacedProcess],
        files: StateFiles,
        listeners: Listeners,
        topology_file: str | None,
    ) -> None:
        self._options = options
        self._topology = options.topology
        self._timings = msgspec.structs.replace(
            options.timings, frontend_drain_s=options.topology.frontend.drain_timeout_s + FRONTEND_GRACE_S
        )
        self._processes = processes
        self._files = files
        self._listeners = listeners
        self._topology_file = topology_file
        self._heartbeats = Heartbeats(socket.gethostname())
        self._stop = anyio.Event()
        self._hurry = anyio.Event()
        self._supervised: list[SupervisedProcess] = []
        self._verdict: Verdict | None = None
        self._log = get_logger("busllm.up")

    async def run(self) -> int:
        """Runs until told to stop; returns the exit status."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen_to_signals)
            async with self._bus_server() as server:
                await self._serve(server)
            tasks.cancel_scope.cancel()
        if self._verdict is None:
            return 0
        _tell(f"busllm up: {self._verdict.reason}")
        return self._verdict.status

    async def _serve(self, server: EmbeddedNatsServer | None) -> None:
        url = self._topology.bus.url if server is None else server.url
        bus = None if self._topology.bus.kind == "memory" else open_topology_bus(self._topology.bus, url)
        watch = None if bus is None else Watch(bus, Subjects(self._topology.cluster), self._heartbeats)
        say_gone = _say_nothing if watch is None else watch.say_gone
        supervised = self._supervised = [self._supervise(placed, url, say_gone) for placed in self._processes]
        self._write_state(url)
        async with anyio.create_task_group() as background:
            if watch is not None:
                background.start_soon(self._watch, watch)
            else:
                self._watch_health(background, supervised)
            if server is not None:
                background.start_soon(keep_bus_server, server, self._timings.restart, self._give_up)
            background.start_soon(self._announce_ready, bus)
            await Supervisor(supervised, self._timings).run(self._stop.wait, self._hurry.wait)
            background.cancel_scope.cancel()

    @asynccontextmanager
    async def _bus_server(self) -> AsyncIterator[EmbeddedNatsServer | None]:
        """The bus server of this host, when the topology names no other: started first, stopped last."""
        bus = self._topology.bus
        if bus.kind != "nats" or bus.url is not None:
            yield None
            return
        server = EmbeddedNatsServer(
            NatsServerOptions(
                runtime_dir=self._files.bus_server,
                wrapper=tuple(wrapper_command(os.getpid())),
                max_payload_bytes=bus.max_payload_bytes,
            )
        )
        await server.start()
        try:
            yield server
        finally:
            await server.stop()

    def _supervise(
        self, placed: PlacedProcess, url: str | None, say_gone: Callable[[Sequence[Announcement]], None]
    ) -> SupervisedProcess:
        make = self._options.command_for or self._stage_command
        command = make(placed, url, self._listeners)

        def child_ended(last_words: Sequence[Announcement]) -> None:
            say_gone(last_words)
            for process in self._supervised:
                if process.placed != placed and process.placed.replicas & placed.replicas:
                    process.mate_ended()

        return SupervisedProcess(placed, command, self._heartbeats, self._timings, child_ended, self._judge)

    def _stage_command(self, placed: PlacedProcess, url: str | None, listeners: Listeners) -> ChildCommand:
        return stage_command(placed, topology_file=self._topology_file, bus_url=url, listen_fds=listeners.fds)

    def _write_state(self, url: str | None) -> None:
        kind = self._topology.bus.kind
        bus = MEMORY if kind == MEMORY else url or kind
        self._files.write_state(
            RunningCluster(
                cluster=self._topology.cluster,
                bus=bus,
                http=self._listeners.urls,
                pid=os.getpid(),
                topology=self._topology_file,
            )
        )

    async def _watch(self, watch: Watch) -> None:
        try:
            await watch.run()
        except BusPermissionDenied as error:
            self._give_up(str(error))

    def _watch_health(self, tasks: anyio.abc.TaskGroup, supervised: Sequence[SupervisedProcess]) -> None:
        """Without a bus to hear heartbeats on, an answer over HTTP is the sign of life."""
        for process in supervised:
            for index in process.placed.frontend_indexes:
                heard = partial(self._heard, process)
                tasks.start_soon(watch_health, self._listeners.url_of(index), heard, self._timings.look_s)

    def _heard(self, process: SupervisedProcess) -> None:
        if process.pid is not None:
            self._heartbeats.hear_process(process.pid)

    async def _announce_ready(self, bus: Bus | None) -> None:
        stages = tuple(stage for placed in self._processes for stage in placed.stages)
        urls = self._listeners.urls
        places = {announced_place(self._topology, stage) for stage in stages}
        await wait_until_ready(urls, places, None if bus is None else self._heartbeats, _ProgressLines().show)
        what = ", ".join(urls or map(str, stages))
        carrier = "memory" if bus is None else f"{bus.address}, secrets hidden"
        _tell(f"ready: {what} (bus {carrier}, cluster {self._topology.cluster})")

    async def _listen_to_signals(self) -> None:
        wanted = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            wanted.append(signal.SIGHUP)
        with anyio.open_signal_receiver(*wanted) as signals:
            async for number in signals:
                self._log.info("signal", name=number.name, meaning="hurry" if self._stop.is_set() else "drain")
                if self._stop.is_set():
                    self._hurry.set()
                self._stop.set()

    def _judge(self, verdict: Verdict) -> None:
        """The first verdict counts; what follows from stopping is no news."""
        if self._verdict is None and not self._stop.is_set():
            self._verdict = verdict
        self._stop.set()

    def _give_up(self, reason: str) -> None:
        self._judge(Verdict(EXIT_FAILURE, reason))


class _ProgressLines:
    """Tells on a terminal what is still starting, each state once."""

    def __init__(self) -> None:
        self._shown: list[str] = []

    def show(self, progress: list[str]) -> None:
        """Prints the list when it is new."""
        if progress and progress != self._shown and sys.stderr.isatty():
            _tell(f"starting: {', '.join(progress)}")
        self._shown = progress


def _tell(line: str) -> None:
    """Writes a line for people in one piece: the children write to the same place."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _say_nothing(announcements: Sequence[Announcement]) -> None:
    """Without a bus there is nobody to tell."""
