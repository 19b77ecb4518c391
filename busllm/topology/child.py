"""One child process of `busllm up`.

Owns: its command line, environment and inherited sockets; starting it in a session of its own, so that a terminal's
Ctrl-C reaches only `up`, and so that it dies with `up` even on `kill -9`.
Does not know: what is to be done when it ends (`supervise.py`).
Next on the path: `die_with_parent.py`, then `busllm stage`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

import anyio
import anyio.abc
import msgspec

from busllm.topology.die_with_parent import wrapper_command
from busllm.topology.last_words import LAST_WORDS_VARIABLE, LastWords
from busllm.topology.placement import PlacedProcess

BUS_URL_VARIABLE = "BUSLLM_BUS_URL"
LISTEN_FDS_VARIABLE = "BUSLLM_LISTEN_FDS"


class ChildCommand(msgspec.Struct, frozen=True):
    """How one process is started.

    Attributes:
        arguments: the command line.
        environment: variables beside those of `up` itself.
        inherited_fds: file descriptors that stay open.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    inherited_fds: tuple[int, ...] = ()


def stage_command(
    process: PlacedProcess, *, topology_file: str | None, bus_url: str | None, listen_fds: Mapping[int, int]
) -> ChildCommand:
    """The command that runs the stages of a placed process.

    Args:
        topology_file: None = the built-in topology.
        bus_url: with its secret; goes by environment, which other users cannot read. None = a memory bus.
        listen_fds: listening sockets by frontend index.
    """
    fds = {index: listen_fds[index] for index in process.frontend_indexes if index in listen_fds}
    arguments = [sys.executable, "-m", "busllm.cli.main", "stage", *map(str, process.stages)]
    if topology_file is not None:
        arguments += ["--topology", topology_file]
    environment = {LISTEN_FDS_VARIABLE: json.dumps({str(index): fd for index, fd in fds.items()})}
    if bus_url is not None:
        environment[BUS_URL_VARIABLE] = bus_url
    return ChildCommand(tuple(arguments), environment, tuple(sorted(set(fds.values()))))


class ChildEnd(msgspec.Struct, frozen=True):
    """How a child ended.

    Attributes:
        status: its exit status, or minus the signal that ended it.
        reason: its own words; empty when it had none.
    """

    status: int
    reason: str


class Child:
    """A started child. Made by `start_child`."""

    def __init__(self, process: anyio.abc.Process, last_words: LastWords) -> None:
        self._process = process
        self._last_words = last_words

    @property
    def pid(self) -> int:
        """Its process id, which is also its session's."""
        return self._process.pid

    async def wait(self) -> ChildEnd:
        """Waits for its end. Called once."""
        status = await self._process.wait()
        return ChildEnd(status, self._last_words.read())

    def send(self, signal_number: signal.Signals) -> None:
        """Sends a signal; does nothing when it has ended."""
        if self._process.returncode is None:
            self._process.send_signal(signal_number)


async def start_child(command: ChildCommand) -> Child:
    """Starts a child with stdout and stderr of `up`, and no stdin.

    Raises:
        OSError: it cannot be started.
    """
    last_words = LastWords()
    try:
        process = await anyio.open_process(
            [*wrapper_command(os.getpid()), *command.arguments],
            stdin=subprocess.DEVNULL,
            stdout=None,
            stderr=None,
            env={**os.environ, **command.environment, LAST_WORDS_VARIABLE: str(last_words.writer)},
            start_new_session=True,
            pass_fds=(*command.inherited_fds, last_words.writer),
        )
    finally:
        last_words.started()
    return Child(process, last_words)
