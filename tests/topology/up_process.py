"""A running `fake_up.py`, its output line by line, and the processes below it."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import httpx
from anyio.streams.text import TextReceiveStream

from busllm.topology.state import RunningCluster, find_cluster

DEADLINE_S = 20


class UpProcess:
    """One run; its stdout and stderr are read as one stream."""

    def __init__(self, process: anyio.abc.Process, state_home: Path) -> None:
        self._process = process
        self._stream = TextReceiveStream(process.stdout)  # type: ignore[arg-type]
        self._state_home = state_home
        self._rest = ""
        self._unseen: list[str] = []
        self.lines: list[str] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def line(self, pattern: str) -> re.Match[str]:
        """The first line that matches and that no call has returned yet."""
        with anyio.move_on_after(DEADLINE_S):
            while True:
                for line in self._unseen:
                    if match := re.search(pattern, line):
                        self._unseen.remove(line)
                        return match
                try:
                    self._take(await self._stream.receive())
                except anyio.EndOfStream as error:
                    raise AssertionError(self._without(pattern)) from error
        raise AssertionError(self._without(pattern))

    def _without(self, pattern: str) -> str:
        return f"no line matches {pattern!r} in:\n" + "\n".join(self.lines)

    def _take(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        self.lines += lines
        self._unseen += lines

    async def started(self, kind: str) -> int:
        """Waits for the next start of a process; returns its pid."""
        return int((await self.line(rf"^started {kind}\S* (\d+)$"))[1])

    async def end(self) -> int:
        """Reads the rest of the output and returns the exit status."""
        with anyio.fail_after(DEADLINE_S):
            async for text in self._stream:
                self._take(text)
            return await self._process.wait()

    def running(self) -> RunningCluster:
        """What the state file tells."""
        return find_cluster(directory=self._state_home / "busllm")

    def bus_server_pid(self) -> int:
        """Process id of the bus server, from the name of the file in which it tells its port."""
        (ports,) = (self._state_home / "busllm").glob("*.bus/*.ports")
        return int(ports.stem.rpartition("_")[2])


@asynccontextmanager
async def fake_up(
    tmp_path: Path, text: str = "", *behaviours: str, listen: str = "127.0.0.1:0"
) -> AsyncIterator[UpProcess]:
    """Starts `fake_up.py` with the topology of `text`, by default on a free port; kills it at the end."""
    topology = tmp_path / "topology.toml"
    topology.write_text(f"model.source = 'null'\nfrontend.listen = '{listen}'\n{text}")
    async with await anyio.open_process(
        [sys.executable, str(Path(__file__).with_name("fake_up.py")), str(topology), *behaviours],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    ) as process:
        try:
            yield UpProcess(process, tmp_path)
        finally:
            if process.returncode is None:
                process.kill()


async def get_status(url: str) -> int:
    """The status of an HTTP answer, however long it takes."""
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        return (await client.get(url)).status_code


def wait_for_end(*pids: int) -> None:
    """Waits until processes that are no children of this one have ended."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(handle):
            assert select.select([handle], [], [], DEADLINE_S)[0], f"process {pid} lives"


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
