"""Keeps the processes of one host running, and stops them in order.

Owns: restarting a process that exits or falls silent, with pauses and a limit; which exits end everything; the order
of the drain.
Does not know: command lines (`child.py`), where announcements come from (`watch.py`), the bus server (`bus_keeper.py`).
Next on the path: `up.py` puts it together with the rest.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Sequence

import anyio
import msgspec

from busllm.messages.control import Announcement
from busllm.telemetry.logging import get_logger
from busllm.topology.child import Child, ChildCommand, ChildEnd, start_child
from busllm.topology.heartbeats import Heartbeats
from busllm.topology.placement import PlacedProcess
from busllm.topology.restarts import RestartPolicy, RestartTimings

EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_SUPERSEDED = 3
_FINAL_EXITS = (EXIT_CONFIG, EXIT_SUPERSEDED)  # a restart would end the same way


class SupervisionTimings(msgspec.Struct, frozen=True):
    """Durations of supervising.

    Attributes:
        restart: see `RestartTimings`.
        silent_s: a process that was heard and then is silent for this long is killed and restarted.
        mate_silent_s: the same for the rank of a replica of which another rank has ended.
        first_word_s: how long a new process may take to its first announcement.
        look_s: how often silence is looked at.
        frontend_drain_s: how long processes with a frontend may take to end after SIGTERM.
        stop_s: how long the others may take.
        hurried_stop_s: how long all of them may take after a second signal.
    """

    restart: RestartTimings = RestartTimings()
    silent_s: float = 10.0
    mate_silent_s: float = 2.0
    first_word_s: float = 60.0
    look_s: float = 0.5
    frontend_drain_s: float = 40.0
    stop_s: float = 10.0
    hurried_stop_s: float = 2.0


class Verdict(msgspec.Struct, frozen=True):
    """Why everything ends: the exit status of `up` and the reason for people."""

    status: int
    reason: str


class SupervisedProcess:
    """One placed process and its current child.

    Args:
        placed: what it holds.
        command: how it is started.
        heartbeats: where its signs of life are noted.
        timings: durations.
        child_ended: told when a child has, with the instances that had not said goodbye themselves.
        judge: told when the process cannot go on.
    """

    def __init__(
        self,
        placed: PlacedProcess,
        command: ChildCommand,
        heartbeats: Heartbeats,
        timings: SupervisionTimings,
        child_ended: Callable[[Sequence[Announcement]], None],
        judge: Callable[[Verdict], None],
    ) -> None:
        self.placed = placed
        self.ended = anyio.Event()
        self._command = command
        self._heartbeats = heartbeats
        self._timings = timings
        self._child_ended = child_ended
        self._judge = judge
        self._stopping = anyio.Event()
        self._child: Child | None = None
        self._mate_ended = False
        self._log = get_logger("busllm.up", process=placed.name)

    @property
    def pid(self) -> int | None:
        """Process id of the latest child; None before the first."""
        return None if self._child is None else self._child.pid

    async def run(self) -> None:
        """Keeps a child running until `stop`, or until the process is given up. When cancelled, kills the child."""
        policy = RestartPolicy(self._timings.restart)
        try:
            while not self._stopping.is_set():
                end = await self._run_child()
                if self._stopping.is_set() or not await self._pause(policy, end):
                    break
        finally:
            self.kill()
            self.ended.set()

    def stop(self) -> None:
        """Asks the child to end, and starts no other."""
        self._stopping.set()
        if self._child is not None:
            self._child.send(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the child at once, and starts no other."""
        self._stopping.set()
        if self._child is not None:
            self._child.send(signal.SIGKILL)

    def mate_ended(self) -> None:
        """Another rank of its replica has ended: the child ends by itself, unless it is frozen."""
        self._mate_ended = True

    async def _run_child(self) -> ChildEnd:
        self._mate_ended = False
        child = self._child = await start_child(self._command)
        self._heartbeats.add(child.pid)
        if self._stopping.is_set():  # while it was being started
            child.send(signal.SIGTERM)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._kill_when_silent, child)
                end = await child.wait()
                tasks.cancel_scope.cancel()
        finally:
            self._child_ended(self._heartbeats.remove(child.pid))
        return end

    async def _kill_when_silent(self, child: Child) -> None:
        while True:
            limit_s = self._silence_limit_s(child)
            if self._heartbeats.silent_s(child.pid) > limit_s and not self._stopping.is_set():
                self._log.error("process_silent", pid=child.pid, silent_s=limit_s)
                child.send(signal.SIGKILL)
                return
            await anyio.sleep(self._timings.look_s)

    def _silence_limit_s(self, child: Child) -> float:
        if not self._heartbeats.has_spoken(child.pid):
            return self._timings.first_word_s
        return self._timings.mate_silent_s if self._mate_ended else self._timings.silent_s

    async def _pause(self, policy: RestartPolicy, end: ChildEnd) -> bool:
        """Waits before a restart; False = there will be none."""
        ended = _exit_text(end.status)
        if end.status in _FINAL_EXITS:
            self._judge(Verdict(end.status, f"{self.placed.name} {ended}" + (f": {end.reason}" if end.reason else "")))
            return False
        pause_s = policy.pause_s(anyio.current_time())
        if pause_s is None:
            limits = self._timings.restart
            self._judge(
                Verdict(
                    EXIT_FAILURE,
                    f"{self.placed.name} {ended}, the {limits.limit + 1}th end within {limits.window_s:g} s"
                    + (f": {end.reason}" if end.reason else "; its own messages above say why"),
                )
            )
            return False
        self._log.warning("process_ended", status=end.status, meaning=ended, reason=end.reason, restart_in_s=pause_s)
        with anyio.move_on_after(pause_s):
            await self._stopping.wait()
        return True


class Supervisor:
    """All processes of this host.

    Args:
        processes: in any order.
        timings: durations.
    """

    def __init__(self, processes: Sequence[SupervisedProcess], timings: SupervisionTimings) -> None:
        self._processes = tuple(processes)
        self._timings = timings

    async def run(self, stop: Callable[[], Awaitable[object]], hurry: Callable[[], Awaitable[object]]) -> None:
        """Runs the processes until `stop()` returns, then drains them; faster once `hurry()` returns."""
        async with anyio.create_task_group() as tasks:
            for process in self._processes:
                tasks.start_soon(process.run)
            await stop()
            tasks.start_soon(self._hurry, hurry)
            await self._drain()
            tasks.cancel_scope.cancel()

    async def _drain(self) -> None:
        """Frontends finish what runs while all others still serve them; then the others stop."""
        first = [process for process in self._processes if process.placed.holds("frontend")]
        others = [process for process in self._processes if process not in first]
        await _stop_all(first, self._timings.frontend_drain_s)
        await _stop_all(others, self._timings.stop_s)

    async def _hurry(self, hurry: Callable[[], Awaitable[object]]) -> None:
        await hurry()
        await _stop_all(self._processes, self._timings.hurried_stop_s)


async def _stop_all(processes: Sequence[SupervisedProcess], within_s: float) -> None:
    for process in processes:
        process.stop()
    with anyio.move_on_after(within_s):
        for process in processes:
            await process.ended.wait()
    for process in processes:
        process.kill()
    for process in processes:
        await process.ended.wait()


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
