"""When an owner looks at which of its requests.

Owns: one moment per live request, and the order of these moments, so that a tick touches the requests that are due and
no others, however many are open.
Does not know: what is looked at (`requests/watch.py`), what made a moment (`requests/sending.py`).
"""

from __future__ import annotations

import heapq


class Agenda:
    """A priority queue of uids. Noting a moment costs O(log n); an earlier note about the same uid is void."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._due)

    def note(self, uid: str, at: float) -> None:
        """A request is to be looked at by then, in place of what was noted before."""
        if self._due.get(uid) != at:
            self._due[uid] = at
            heapq.heappush(self._heap, (at, uid))

    def note_all(self, at: float) -> None:
        """Something has changed for all: each is to be looked at by then."""
        self._due = dict.fromkeys(self._due, at)
        self._heap = [(at, uid) for uid in sorted(self._due)]  # in order, so it is a heap

    def forget(self, uid: str) -> None:
        """A request has ended."""
        self._due.pop(uid, None)

    def take(self, now: float, max_uids: int) -> list[str]:
        """The uids that are due, longest due first; each has to be noted anew. What is over the limit stays due."""
        taken: list[str] = []
        heap, due = self._heap, self._due
        while heap and heap[0][0] <= now and len(taken) < max_uids:
            at, uid = heapq.heappop(heap)
            if due.get(uid) == at:
                del due[uid]
                taken.append(uid)
        return taken
