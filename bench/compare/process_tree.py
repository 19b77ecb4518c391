"""A server as the kernel sees it: all of its processes, their CPU time and their memory.

Owns: reading `/proc` for a process and its descendants, and ending them. Descendants and not the process group, since
servers put children into sessions of their own.
Does not know: what runs.
Next on the path: `server.py`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOOK_S = 0.05
_KILLED_S = 10.0  # the kernel needs a moment for a process that is large


class Status(msgspec.Struct, frozen=True):
    """One line of `/proc/PID/stat`.

    Attributes:
        started: clock ticks after boot; with the pid it names a process for ever.
        cpu_s: user and system time, that of its ended children included.
    """

    pid: int
    parent: int
    state: str
    started: int
    cpu_s: float


def status_of(text: str) -> Status:
    """Reads a `stat` line (proc(5)), from behind the command's name, which may hold blanks and parentheses."""
    pid, _, rest = text.partition(" (")
    fields = rest.rpartition(")")[2].split()
    ticks = sum(int(field) for field in fields[11:15])
    return Status(int(pid), int(fields[1]), fields[0], int(fields[19]), ticks / _TICKS_PER_S)


def processes_under(root: int) -> list[Status]:
    """A process that lives and all that descend from it."""
    children: dict[int, list[Status]] = {}
    everyone: dict[int, Status] = {}
    for path in PROC.glob("[0-9]*/stat"):
        status = _status_at(path)
        if status is not None and status.state != "Z":
            everyone[status.pid] = status
            children.setdefault(status.parent, []).append(status)
    found, open_pids = [everyone[root]] if root in everyone else [], [root]
    while open_pids:
        below = children.get(open_pids.pop(), [])
        found += below
        open_pids += [status.pid for status in below]
    return found


def cpu_s(root: int) -> float:
    """CPU seconds of the whole tree since each process began."""
    return sum(status.cpu_s for status in processes_under(root))


def pss_bytes(root: int) -> int:
    """Memory of the whole tree as proportional set size: a page that k processes share counts 1/k for each."""
    return sum(_pss_bytes_of(status.pid) for status in processes_under(root))


def end(root: int, grace_s: float) -> None:
    """Asks the root to end, waits, and kills what is left of its tree. The root must still be waited for.

    Args:
        grace_s: how long the tree may take.
    """
    tree = processes_under(root)
    _signal(root, signal.SIGTERM)
    left = _left_after(grace_s, tree)
    for status in left:
        _signal(status.pid, signal.SIGKILL)
    _left_after(_KILLED_S, left)


def _left_after(patience_s: float, tree: list[Status]) -> list[Status]:
    """Waits until none of them lives, but not for ever; who still does."""
    give_up_at_s = time.monotonic() + patience_s
    while (left := [status for status in tree if _lives(status)]) and time.monotonic() < give_up_at_s:
        time.sleep(_LOOK_S)
    return left


def _lives(known: Status) -> bool:
    now = _status_at(PROC / str(known.pid) / "stat")
    return now is not None and now.started == known.started and now.state != "Z"


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended by itself


def _status_at(path: Path) -> Status | None:
    try:
        return status_of(path.read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None  # it ended while we looked


def _pss_bytes_of(pid: int) -> int:
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it ended while we looked
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
