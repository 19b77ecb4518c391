"""Memory of aborted requests, since an abort can overtake the request that it ends.

Owns: a bounded table uid → highest aborted attempt (or all).
"""

from __future__ import annotations

from collections import OrderedDict

MAX_TOMBSTONES = 10_000


class Tombstones:
    """What was aborted lately at one stage; the oldest entries are forgotten."""

    def __init__(self, max_entries: int = MAX_TOMBSTONES) -> None:
        self._max_entries = max_entries
        self._aborted: OrderedDict[str, int | None] = OrderedDict()

    def bury(self, uid: str, attempt: int | None) -> None:
        """Notes an abort; `attempt` None = every attempt."""
        if uid in self._aborted:
            known = self._aborted.pop(uid)
            attempt = None if known is None or attempt is None else max(known, attempt)
        self._aborted[uid] = attempt
        if len(self._aborted) > self._max_entries:
            self._aborted.popitem(last=False)

    def covers(self, uid: str, attempt: int) -> bool:
        """Whether this attempt was aborted."""
        if uid not in self._aborted:
            return False
        highest = self._aborted[uid]
        return highest is None or attempt <= highest
