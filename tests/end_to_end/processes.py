"""Real processes under test: who descends from whom, waiting for ends, free ports, waiting for conditions."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import anyio

LOOK_S = 0.05
PATIENCE_S = 30.0


def descendants(pid: int) -> set[int]:
    """Process ids of children, grandchildren and so on that live now."""
    children = defaultdict(list)
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended just now
        children[int(fields[1])].append(int(status.parent.name))
    found: set[int] = set()
    unseen = [pid]
    while unseen:
        for child in children[unseen.pop()]:
            found.add(child)
            unseen.append(child)
    return found


def still_alive(pids: Iterable[int], within_s: float) -> set[int]:
    """Waits until processes have ended; returns those that have not in that time. Zombies have ended."""
    give_up_at = time.monotonic() + within_s
    alive = set()
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(handle):
            if not select.select([handle], [], [], max(0.0, give_up_at - time.monotonic()))[0]:
                alive.add(pid)
    return alive


def kill_all(pids: Iterable[int]) -> None:
    """Ends processes, those that are stopped too."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, within_s: float = PATIENCE_S) -> None:
    """Polls a condition until it holds.

    Raises:
        AssertionError: it does not in that time.
    """
    give_up_at = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < give_up_at, f"not within {within_s:g} s: {what}"
        await anyio.sleep(LOOK_S)
