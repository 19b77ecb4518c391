"""A cluster of real processes: started by `busllm up`, or stage by stage by hand; watched and stopped.

Everything is in a directory of its own (state files, logs, topology), on free ports; nothing is left when it was
stopped, which `stop` checks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.end_to_end.processes import (
    LOOK_S,
    PATIENCE_S,
    descendants,
    eventually,
    kill_all,
    still_alive,
)

START_S = 60.0
STOP_S = 45.0
HEARTBEAT_S = 0.5
BUSLLM = (sys.executable, "-m", "busllm.cli.main")

Counts = dict[str, float]


class Cluster:
    """Processes that together serve one topology.

    Args:
        directory: for everything that is written.
        topology: text of the topology file.
    """

    def __init__(self, directory: Path, topology: str) -> None:
        self.directory = directory
        self.file = directory / "topology.toml"
        self.file.write_text(topology)
        self.started: list[subprocess.Popen[bytes]] = []
        self.log = directory / "log"
        self.log.touch()
        self.seconds_to_ready: float | None = None
        self._seen: set[int] = set()
        self._url: str | None = None
        self._bus_url: str | None = None

    # ------------------------------------------------------------ life

    def start(self, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts `busllm WORDS --topology FILE`."""
        return self.start_command([*BUSLLM, *words, "--topology", str(self.file)], environment)

    def start_command(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts any command of the cluster; its output goes to the log."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "XDG_STATE_HOME": str(self.directory), **(environment or {})},
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def stop(self) -> list[int]:
        """Drains and ends everything, last started first; returns the exit statuses in that order.

        Raises:
            AssertionError: something is left, or it did not end in time.
        """
        statuses: list[int] = []
        try:
            for process in reversed(self.started):
                self._seen |= descendants(process.pid)
                process.send_signal(signal.SIGTERM)
                statuses.append(process.wait(STOP_S))
            assert not still_alive(self._seen, within_s=2.0), self.tail()
        finally:
            self.kill()
        return statuses

    def kill(self) -> None:
        """Ends whatever is left, without a word."""
        everything = {process.pid for process in self.started if process.poll() is None}
        for pid in tuple(everything):
            everything |= descendants(pid)
        kill_all(everything | still_alive(self._seen, within_s=0.0))
        for process in self.started:
            process.wait(STOP_S)

    def tail(self) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-4000:]

    # ------------------------------------------------------------ where it is

    def use(self, *, http: str, bus: str | None) -> None:
        """Says where it is, when no state file does."""
        self._url, self._bus_url = http, bus

    def state(self) -> dict[str, Any]:
        """The state file that `busllm up` wrote; waits for it."""
        give_up_at = time.monotonic() + START_S
        while True:
            files = list(self.directory.glob("busllm/*.json"))
            if files:
                found: dict[str, Any] = json.loads(files[0].read_text())
                return found
            assert time.monotonic() < give_up_at, self.tail()
            assert all(process.poll() is None for process in self.started), self.tail()
            time.sleep(LOOK_S)

    @property
    def url(self) -> str:
        """Of the first frontend."""
        if self._url is None:
            self._url = self.state()["http"][0]
        return self._url

    @property
    def bus_url(self) -> str | None:
        """With its secret; None for a memory bus."""
        if self._url is None:
            self._url = self.state()["http"][0]
        if self._bus_url is None:
            bus = self.state()["bus"] if not self.has_no_state else None
            self._bus_url = None if bus == "memory" else bus
        return self._bus_url

    @property
    def has_no_state(self) -> bool:
        """Whether it was started by hand."""
        return not list(self.directory.glob("busllm/*.json"))

    def bus_server_pid(self) -> int:
        """Process id of the bus server of `busllm up`, from the name of the file in which it tells its port."""
        (ports,) = self.directory.glob("busllm/*.bus/*.ports")
        return int(ports.stem.rpartition("_")[2])

    # ------------------------------------------------------------ what it says

    def wait_until_ready(self, within_s: float = START_S) -> float:
        """Waits until a request would be served; returns for how long it did."""
        began = time.monotonic()
        while time.monotonic() < began + within_s:
            assert all(process.poll() is None for process in self.started), self.tail()
            try:
                if httpx.get(self.url + "/ready", timeout=5.0).status_code == 200:
                    for process in self.started:
                        self._seen |= descendants(process.pid)
                    return time.monotonic() - began
            except httpx.TransportError:
                pass  # nobody listens yet
            time.sleep(LOOK_S)
        raise AssertionError(f"not ready within {within_s:g} s:\n{self.tail()}")

    def client(self) -> AsyncOpenAI:
        """The stock client; it tries nothing twice, so that each answer is seen."""
        return AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S * 2)

    def http(self) -> httpx.AsyncClient:
        """A plain HTTP client."""
        return httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S * 2)

    async def counts(self) -> Counts:
        """What the stages announced last: `<kind>_<name>` or `<kind>_<name>.<part>`, summed over instances."""
        async with self.http() as client:
            answer = await client.get("/metrics")
        counts: Counts = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if "instance" in sample.labels and "part" in sample.labels:
                    part = sample.labels["part"]
                    name = sample.name.removeprefix("busllm_") + (f".{part}" if part else "")
                    counts[name] = counts.get(name, 0.0) + sample.value
        return counts

    async def idle(self, within_s: float = PATIENCE_S) -> None:
        """Waits until every stage has been at its baseline for longer than a heartbeat.

        Announcements are half a second old at most, so one look could be older than what it looks for.
        """
        busy: list[str] = []
        since: float | None = None

        async def is_idle() -> bool:
            nonlocal since
            busy[:] = what_is_open(await self.counts())
            since = None if busy else since or time.monotonic()
            return since is not None and time.monotonic() - since > 1.2 * HEARTBEAT_S

        try:
            await eventually(is_idle, "idle", within_s)
        except AssertionError as error:
            raise AssertionError(f"not idle within {within_s:g} s: {busy}\n{self.tail()}") from error

    async def busy(self) -> None:
        """Waits until a sequence runs."""

        async def runs() -> bool:
            return (await self.counts()).get("scheduler_running", 0) > 0

        await eventually(runs, "a sequence runs")


def what_is_open(counts: Counts) -> list[str]:
    """Counts that are not at their baseline; also those that are not announced."""
    zero = (
        "frontend_requests",
        "frontend_open_sequences",
        "tokenizer_requests",
        "detokenizer_open_sequences",
        "scheduler_sequences",
        "scheduler_running",
        "scheduler_waiting",
        "scheduler_kv_pages.owned",
    )
    found = [f"{name} = {counts.get(name)}" for name in zero if counts.get(name) != 0]
    free, cached = counts.get("scheduler_kv_pages.free", 0), counts.get("scheduler_kv_pages.cached", 0)
    if free + cached != counts.get("scheduler_kv_pages.total"):
        found.append(f"{free} free + {cached} cached pages are not all")
    return found
