"""The unix bus, as installed, keeps the guarantees of a busllm bus; its broker is a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import pytest
from busllm_bus_unix import UnixBus

from busllm.bus.connect import BusOptions, open_bus
from busllm.bus.protocol import Bus
from busllm.bus.queue import QueueBounds
from busllm.errors import ConfigError
from busllm.testing.bus_conformance import BusConformance
from busllm.testing.bus_fault_conformance import BusFaultConformance
from busllm.testing.bus_harness import PATIENCE_S, REFUSED_PREFIX, Connections

pytestmark = pytest.mark.anyio


class UnixHarness(Connections):
    """A `BusHarness` on a broker of its own."""

    refused_prefix = REFUSED_PREFIX

    def __init__(self, socket: Path) -> None:
        super().__init__()
        self.socket = socket
        self._process: anyio.abc.Process | None = None

    def bus(self, bounds: QueueBounds) -> Bus:
        return open_bus("unix", BusOptions(url=f"unix://{self.socket}", bounds=bounds))

    async def mend(self) -> None:
        command = [sys.executable, "-m", "busllm_bus_unix.broker", str(self.socket), "--refuse", REFUSED_PREFIX]
        self._process = await anyio.open_process(command, stdin=subprocess.DEVNULL, stdout=None, stderr=None)

    async def cut(self) -> None:
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    async def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        if self._process is not None:
            await anyio.to_thread.run_sync(os.waitid, os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    async def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[UnixHarness]:
    harness = UnixHarness(tmp_path / "bus.sock")
    await harness.mend()
    yield harness
    await harness.thaw()
    await harness.close()
    await harness.cut()


class TestUnixBus(BusConformance):
    pass


class TestUnixBusUnderFaults(BusFaultConformance):
    pass


async def test_nobody_else_may_use_the_socket(harness: UnixHarness) -> None:
    await harness.connect()
    assert harness.socket.stat().st_mode & 0o777 == 0o600


async def test_a_second_broker_does_not_take_the_socket(harness: UnixHarness) -> None:
    await harness.connect()
    command = [sys.executable, "-m", "busllm_bus_unix.broker", str(harness.socket)]
    with anyio.fail_after(PATIENCE_S):
        second = await anyio.run_process(command, check=False, stderr=subprocess.PIPE)
    assert second.returncode != 0
    assert b"another broker" in second.stderr
    await harness.connect()


def test_the_entry_point_makes_the_bus() -> None:
    bus = open_bus("unix", BusOptions(url="unix:///run/bus.sock"))
    assert isinstance(bus, UnixBus)
    assert bus.address == "unix:///run/bus.sock"


@pytest.mark.parametrize("url", [None, "nats://one:4222", "unix://", "unix://host/path"])
def test_a_wrong_url_is_a_configuration_error(url: str | None) -> None:
    with pytest.raises(ConfigError):
        open_bus("unix", BusOptions(url=url))


def test_an_unknown_option_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError) as wrong:
        open_bus("unix", BusOptions(url="unix:///run/bus.sock", extra={"colour": "red"}))
    assert wrong.value.key == "bus.colour"
