"""The NATS server that comes with busllm."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest

from busllm.bus.nats import NatsBus
from busllm.bus.nats_options import NatsOptions
from busllm.bus.nats_server import EmbeddedNatsServer, NatsServerOptions, find_nats_server
from busllm.errors import BusDown, BusError
from busllm.testing.bus_harness import PATIENCE_S
from busllm.topology.die_with_parent import wrapper_command

pytestmark = pytest.mark.anyio

PARENT = """
import anyio, os, pathlib, sys
from busllm.bus.nats_server import EmbeddedNatsServer, NatsServerOptions
from busllm.topology.die_with_parent import wrapper_command

async def main():
    wrapper = tuple(wrapper_command(os.getpid()))
    server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=pathlib.Path(sys.argv[1]), wrapper=wrapper))
    await server.start()
    print(server.pid, flush=True)
    await anyio.sleep_forever()

anyio.run(main)
"""


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def command_line_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


async def can_connect(url: str) -> bool:
    connection = await NatsBus(NatsOptions(urls=(url,))).connect(name="a", inbox="inbox.a")
    await connection.close()
    return True


async def test_its_files_are_private_and_the_token_is_nowhere_else(tmp_path: Path) -> None:
    server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=tmp_path / "run"))
    await server.start()
    token = urlsplit(server.url).username or ""
    assert len(token) >= 32
    assert mode_of(tmp_path / "run") == 0o700
    config = tmp_path / "run" / "nats-server.conf"
    assert mode_of(config) == 0o600
    assert token in config.read_text()
    assert await can_connect(server.url)
    assert token not in server.public_url
    assert token not in server.log_file.read_text()
    assert server.pid is not None and token not in command_line_of(server.pid)
    await server.stop()
    assert not config.exists()
    assert server.pid is None


async def test_it_listens_on_the_loopback_alone_in_a_session_of_its_own(tmp_path: Path) -> None:
    server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=tmp_path))
    await server.start()
    assert urlsplit(server.url).hostname == "127.0.0.1"
    assert server.pid is not None and os.getsid(server.pid) == server.pid
    await server.stop()


async def test_a_restart_keeps_port_and_token(tmp_path: Path) -> None:
    server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=tmp_path))
    await server.start()
    url, first_pid = server.url, server.pid
    assert first_pid is not None
    os.kill(first_pid, signal.SIGKILL)
    with anyio.fail_after(PATIENCE_S):
        assert await server.wait() == -signal.SIGKILL
    await server.restart()
    assert (server.url, server.pid != first_pid) == (url, True)
    assert await can_connect(url)
    await server.restart()
    assert server.url == url
    await server.stop()


async def test_a_taken_port_is_an_error_with_the_servers_own_words(tmp_path: Path) -> None:
    server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=tmp_path))
    await server.start()
    await server.stop()
    taken = socket.create_server(("127.0.0.1", urlsplit(server.url).port or 0))
    with taken, pytest.raises(BusError, match="address already in use"):
        await server.start()
    assert server.pid is None


async def test_a_frozen_server_is_stopped_by_force(tmp_path: Path) -> None:
    server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=tmp_path, stop_timeout_s=0.2))
    await server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with anyio.fail_after(PATIENCE_S):
        await server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_it_has_no_url_before_it_was_started(tmp_path: Path) -> None:
    server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=tmp_path))
    with pytest.raises(BusDown):
        _ = server.url


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_it_dies_with_its_parent_even_when_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server_pid = int(parent.stdout.readline())
    descriptor = os.pidfd_open(server_pid)
    parent.kill()
    parent.wait()
    readable, _, _ = select.select([descriptor], [], [], PATIENCE_S)
    os.close(descriptor)
    parent.stdout.close()
    assert readable, "the server outlived its parent"


async def test_with_the_wrapper_it_keeps_its_pid_and_is_stopped_as_usual(tmp_path: Path) -> None:
    options = NatsServerOptions(runtime_dir=tmp_path, wrapper=tuple(wrapper_command(os.getpid())))
    server = EmbeddedNatsServer(options)
    await server.start()
    assert server.pid is not None and command_line_of(server.pid).startswith(str(find_nats_server()))
    await server.stop()
