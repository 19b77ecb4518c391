"""What the stages of this host's processes said last.

Owns: per process, the last announcement of each instance and the time since anything was heard.
Does not know: the bus (`watch.py` feeds it), what follows from silence (`supervise.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from busllm.messages.control import Announcement, StageState


class Heartbeats:
    """Announcements of the processes of one host.

    Args:
        host: announcements of other hosts are ignored.
        now_s: a monotonic clock.
    """

    def __init__(self, host: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._now_s = now_s
        self._last: dict[int, dict[str, Announcement]] = {}  # pid → instance → its last word
        self._heard_at_s: dict[int, float] = {}
        self._spoken: set[int] = set()
        self._deaf = False

    def add(self, pid: int) -> None:
        """A process was started: its silence counts from now."""
        self._heard_at_s[pid] = self._now_s()
        self._last[pid] = {}

    def hear(self, announcement: Announcement) -> None:
        """Notes an announcement."""
        if announcement.host == self._host and announcement.pid in self._last:
            self._last[announcement.pid][announcement.instance] = announcement
            self.hear_process(announcement.pid)

    def hear_process(self, pid: int) -> None:
        """Notes a sign of life, an announcement or an HTTP answer."""
        if pid in self._heard_at_s:
            self._heard_at_s[pid] = self._now_s()
            self._spoken.add(pid)

    def go_deaf(self) -> None:
        """The bus is away: until `listen_again` nobody counts as silent."""
        self._deaf = True

    def listen_again(self) -> None:
        """Every silence counts from now: what was said before may have been missed."""
        self._deaf = False
        for pid in self._heard_at_s:
            self._heard_at_s[pid] = self._now_s()

    def silent_s(self, pid: int) -> float:
        """How long a process has been silent, as far as this side could hear."""
        return 0.0 if self._deaf else self._now_s() - self._heard_at_s[pid]

    def has_spoken(self, pid: int) -> bool:
        """Whether a process has given a sign of life yet."""
        return pid in self._spoken

    def remove(self, pid: int) -> list[Announcement]:
        """A process has ended.

        Returns:
            The last announcements of its instances that had not said goodbye themselves.
        """
        del self._heard_at_s[pid]
        self._spoken.discard(pid)
        last = self._last.pop(pid)
        return [announcement for announcement in last.values() if announcement.state is not StageState.GONE]

    def ready_stages(self) -> set[tuple[str, int]]:
        """(kind, index) of the stages that are ready."""
        return {
            (announcement.kind, announcement.index)
            for last in self._last.values()
            for announcement in last.values()
            if announcement.state is StageState.READY
        }

    def progress(self) -> list[str]:
        """What is still starting, for people."""
        return sorted(
            f"{announcement.kind}:{announcement.index} {announcement.progress or announcement.state.value}"
            for last in self._last.values()
            for announcement in last.values()
            if announcement.state is StageState.STARTING
        )
