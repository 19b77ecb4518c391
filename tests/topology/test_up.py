"""`busllm up` with fake children: starts, restarts, limits, the lock, the drain, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import anyio
import pytest

from busllm.bus.connect import BusOptions, open_bus
from busllm.bus.protocol import Connection, Message
from busllm.bus.subjects import Subjects
from busllm.errors import ConfigError
from busllm.messages.control import StageState, announcement_decoder
from tests.topology.up_process import DEADLINE_S, fake_up, free_port, get_status, wait_for_end

pytestmark = pytest.mark.anyio

SUBJECTS = Subjects("local")


async def listen(url: str) -> Connection:
    connection = await open_bus("nats", BusOptions(url=url)).connect(name="test", inbox=SUBJECTS.inbox("test"))
    await connection.subscribe(SUBJECTS.stage("*", "*"))
    return connection


async def announced(connection: Connection, pid: int, state: StageState) -> None:
    """Waits until an instance of a process is said to be in a state."""
    with anyio.fail_after(DEADLINE_S):
        while True:
            for item in await connection.receive():
                if isinstance(item, Message):
                    announcement = announcement_decoder.decode(item.payload)
                    if (announcement.pid, announcement.state) == (pid, state):
                        return


async def test_one_line_says_ready_and_sigterm_drains_frontends_first(tmp_path: Path) -> None:
    async with fake_up(tmp_path, "", "frontend=slow-drain") as up:
        ready = await up.line("^ready: ")
        running = up.running()
        token = running.bus.partition("@")[0].removeprefix("nats://")
        assert running.pid == up.pid
        assert running.http[0] in ready.string
        assert "cluster local" in ready.string
        assert await get_status(running.http[0] + "/ready") == 200
        bus_server = up.bus_server_pid()
        up.signal(signal.SIGTERM)
        assert await up.end() == 0
        said = [line.partition("+")[0] for line in up.lines if line.startswith(("stopping", "ended"))]
        assert said == ["stopping frontend:0", "ended frontend:0", "stopping scheduler:0", "ended scheduler:0"]
        assert token not in "\n".join(up.lines)
        wait_for_end(bus_server)
    with pytest.raises(ConfigError, match="no cluster runs"):
        up.running()


async def test_state_files_are_readable_by_their_user_alone(tmp_path: Path) -> None:
    async with fake_up(tmp_path) as up:
        await up.line("^ready: ")
        directory = tmp_path / "busllm"
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (directory / "local@here.json").stat().st_mode & 0o777 == 0o600


async def test_a_killed_child_is_restarted_and_its_instances_are_said_to_be_gone(tmp_path: Path) -> None:
    async with fake_up(tmp_path) as up:
        scheduler = await up.started("scheduler")
        connection = await listen(up.running().bus)
        await announced(connection, scheduler, StageState.READY)
        os.kill(scheduler, signal.SIGKILL)
        await announced(connection, scheduler, StageState.GONE)
        await announced(connection, await up.started("scheduler"), StageState.READY)
        await connection.close()


async def test_a_child_that_exits_cleanly_is_restarted_too(tmp_path: Path) -> None:
    async with fake_up(tmp_path) as up:
        os.kill(await up.started("scheduler"), signal.SIGTERM)
        await up.started("scheduler")


@pytest.mark.parametrize("bus", ["nats", "memory"])
async def test_a_frozen_child_is_killed_and_restarted(tmp_path: Path, bus: str) -> None:
    async with fake_up(tmp_path, f"bus.kind = '{bus}'") as up:
        frontend = await up.started("frontend")
        await up.line("^ready: ")
        os.kill(frontend, signal.SIGSTOP)
        wait_for_end(frontend)
        assert await up.started("frontend") != frontend


async def test_a_child_that_always_fails_ends_everything_with_status_1(tmp_path: Path) -> None:
    async with fake_up(tmp_path, "", "scheduler=exit-7") as up:
        assert await up.end() == 1
        assert sum(line.startswith("started scheduler") for line in up.lines) == 3
        last = "busllm up: scheduler:0 exited with status 7, the 3th end within 60 s: the scheduler:0 is tired"
        assert up.lines[-1] == last
        assert any(line.startswith("ended frontend") for line in up.lines)


@pytest.mark.parametrize(("status", "kind"), [(2, "scheduler"), (3, "frontend")])
async def test_a_mistake_and_a_superseded_child_are_not_restarted(tmp_path: Path, status: int, kind: str) -> None:
    async with fake_up(tmp_path, "", f"{kind}=exit-{status}") as up:
        assert await up.end() == status
        assert sum(line.startswith(f"started {kind}") for line in up.lines) == 1
        assert re.fullmatch(rf"busllm up: \S+ exited with status {status}: the \S+ is tired", up.lines[-1])


async def test_a_second_signal_kills_what_does_not_stop(tmp_path: Path) -> None:
    async with fake_up(tmp_path, "", "frontend=deaf", "scheduler=deaf") as up:
        await up.line("^ready: ")
        up.signal(signal.SIGTERM)
        await up.line("^stopping frontend")
        up.signal(signal.SIGINT)
        await up.line("^stopping scheduler")
        assert await up.end() == 0


async def test_nothing_is_left_when_up_is_killed(tmp_path: Path) -> None:
    async with fake_up(tmp_path) as up:
        pids = [await up.started("frontend"), await up.started("scheduler"), up.bus_server_pid()]
        up.signal(signal.SIGKILL)
        wait_for_end(*pids)
    with pytest.raises(ConfigError, match="no cluster runs"):
        up.running()  # the state file is still there, but nobody holds the lock
    async with fake_up(tmp_path) as next_one:
        await next_one.line("^ready: ")


async def test_a_second_up_of_the_same_cluster_and_host_exits_2_and_names_the_first(tmp_path: Path) -> None:
    async with fake_up(tmp_path) as first:
        await first.line("^prepared")
        async with fake_up(tmp_path) as second:
            assert await second.end() == 2
            assert f"pid {first.pid}" in second.lines[-1]


async def test_a_taken_port_ends_it_before_anything_is_prepared(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with fake_up(tmp_path, listen=address) as up:
            assert await up.end() == 1
            assert up.lines == [f"error: cannot listen on {address}: Address already in use. "
                                "Stop what uses it, or change frontend.listen in a file for --topology."]  # fmt: skip


async def test_a_killed_bus_server_is_restarted_at_the_same_address(tmp_path: Path) -> None:
    async with fake_up(tmp_path) as up:
        scheduler = await up.started("scheduler")
        await up.line("^ready: ")
        url, bus_server = up.running().bus, up.bus_server_pid()
        os.kill(bus_server, signal.SIGKILL)
        await up.line("bus_back")
        connection = await listen(url)
        await announced(connection, scheduler, StageState.READY)  # no child was restarted for it
        await connection.close()
        assert up.bus_server_pid() != bus_server


async def test_while_an_external_bus_is_away_nobody_is_judged_and_a_signal_still_ends_it(tmp_path: Path) -> None:
    async with fake_up(tmp_path, f"bus.url = 'nats://127.0.0.1:{free_port()}'") as up:
        await up.started("frontend")
        await up.line("cannot|refused|unreachable")
        up.signal(signal.SIGTERM)
        assert await up.end() == 0
        assert sum(line.startswith("started") for line in up.lines) == 2


async def test_frontends_of_one_address_share_a_socket_that_stays_open_while_they_restart(tmp_path: Path) -> None:
    async with fake_up(tmp_path, "frontend.count = 2") as up:
        first, second = await up.started("frontend:0"), await up.started("frontend:1")
        await up.line("^ready: ")
        (url,) = up.running().http
        for pid in (first, second):
            os.kill(pid, signal.SIGKILL)
        wait_for_end(first, second)  # one that is about to die may still accept
        assert await get_status(url) == 200
