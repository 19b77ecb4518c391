"""One server that runs: from its start to its end.

Owns: starting it with its log in a file, waiting until it serves, the time to its first token, its use of the machine.
Does not know: which server it is (`peers/`), what is sent to it later (`client.py`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import msgspec

from bench.compare import process_tree
from busllm.cli.http_target import HttpTarget
from busllm.cli.load.measured import measure
from busllm.cli.load.workload import Workload

_LOOK_S = 0.02
_ANSWER_S = 5.0
_GRACE_S = 45.0  # busllm lets running requests end for 30 s
_MAX_LOG_LINES = 5
_FIRST = Workload(requests=1, input_words=8, output_tokens=1)


class ServerFailure(Exception):
    """A server did not start, or ended."""


class Launch(msgspec.Struct, frozen=True):
    """How a server is started.

    Attributes:
        command: its command line; it stays in the foreground.
        ready_path: answers with 200 as soon as requests are served.
        environment: variables beside those of this process; None takes one away.
    """

    command: tuple[str, ...]
    ready_path: str
    environment: Mapping[str, str | None] = {}


class RunningServer:
    """A started server.

    Attributes:
        url: where it serves.
        start_to_first_token_s: from the start of its process to the first text of a short answer.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, url: str, start_to_first_token_s: float) -> None:
        self._process = process
        self._log = log
        self.url = url
        self.start_to_first_token_s = start_to_first_token_s

    def check(self) -> None:
        """Sees whether it still runs.

        Raises:
            ServerFailure: it has ended; the end of its log stands in the message.
        """
        if self._process.poll() is not None:
            raise ServerFailure(f"it ended with status {self._process.returncode}. {_last_lines(self._log)}")

    def cpu_s(self) -> float:
        """CPU seconds of all its processes up to now."""
        return process_tree.cpu_s(self._process.pid)

    def pss_bytes(self) -> int:
        """Memory of all its processes now."""
        return process_tree.pss_bytes(self._process.pid)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(launch: Launch, *, port: int, model: str, log: Path, patience_s: float) -> Iterator[RunningServer]:
    """Starts a server, and ends it and all of its processes when the block is left.

    Args:
        model: the name under which it serves.
        log: what it says goes here.
        patience_s: how long its start may take.

    Raises:
        ServerFailure: it ended, or did not serve in time; the end of its log stands in the message.
    """
    changed = {**os.environ, **launch.environment}
    environment = {name: value for name, value in changed.items() if value is not None}
    began_s = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a terminal's Ctrl-C is for us, and we end it
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, url + launch.ready_path, log, began_s + patience_s)
        _ask_once(url, model, log)
        yield RunningServer(process, log, url, time.perf_counter() - began_s)
    finally:
        process_tree.end(process.pid, _GRACE_S)
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path, until_s: float) -> None:
    with httpx.Client(timeout=_ANSWER_S, trust_env=False) as client:
        while not _answers(client, url):
            if process.poll() is not None:
                raise ServerFailure(f"it ended with status {process.returncode}. {_last_lines(log)}")
            if time.perf_counter() > until_s:
                raise ServerFailure(f"it does not serve. {_last_lines(log)}")
            time.sleep(_LOOK_S)


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False  # not yet


def _ask_once(url: str, model: str, log: Path) -> None:
    [body] = _FIRST.bodies(model)
    answer = anyio.run(measure, HttpTarget(url, None), _FIRST.path, body, _ANSWER_S * 10)
    if answer.error is not None:
        raise ServerFailure(f"its first answer failed: {answer.error}. {_last_lines(log)}")


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-_MAX_LOG_LINES:]
    return f"The end of {log}: " + " | ".join(lines) if lines else f"{log} is empty."
