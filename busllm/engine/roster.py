"""The sequences that have a slot.

Owns: the slots, the running sequences in their order of seniority, the ones that are leaving but are still part of a
launched step, and the slots whose state the next plan tells the runner to drop.
Does not know: pages, rows, the queue.
"""

from __future__ import annotations

import bisect

from busllm.engine.live_sequence import LiveSequence


class Roster:
    """Slots 0 … max_running-1 and who has them.

    Attributes:
        running: the oldest first; within one priority, that is.
        leaving: ended or to be retracted, but a launched step still uses their pages.
    """

    def __init__(self, max_running: int) -> None:
        self.running: list[LiveSequence] = []
        self.leaving: set[LiveSequence] = set()
        self._free_slots = list(range(max_running - 1, -1, -1))
        self._closed: list[int] = []

    @property
    def num_free_slots(self) -> int:
        """Slots that a sequence could take."""
        return len(self._free_slots)

    @property
    def all_held(self) -> bool:
        """Whether no running sequence may make progress (none at all included)."""
        return all(seq.held for seq in self.running)

    def holders(self) -> set[LiveSequence]:
        """All that hold a slot and pages."""
        return self.leaving.union(self.running)

    def seat(self, seq: LiveSequence) -> None:
        """Gives a sequence a slot."""
        seq.slot = self._free_slots.pop()
        bisect.insort(self.running, seq, key=_seniority)

    def dismiss(self, seq: LiveSequence) -> None:
        """Takes a sequence out of the running ones; its slot is given back later."""
        index = bisect.bisect_left(self.running, seq.seniority, key=_seniority)
        assert self.running[index] is seq
        del self.running[index]

    def unseat(self, seq: LiveSequence) -> None:
        """Takes the slot of a sequence that no launched step uses any more."""
        assert seq.slot is not None
        self.leaving.discard(seq)
        self._free_slots.append(seq.slot)
        if seq.opened:
            self._closed.append(seq.slot)

    def take_closed(self) -> list[int]:
        """Slots closed since the last plan."""
        closed, self._closed = self._closed, []
        return closed

    def victim(self, number: int) -> LiveSequence | None:
        """Whom to retract for step `number`: the youngest that is not part of it, held ones before all others."""
        candidates = [seq for seq in self.running if seq.planned_in != number and not seq.retracting]
        held = [seq for seq in candidates if seq.held]
        candidates = held or candidates
        return candidates[-1] if candidates else None


def _seniority(seq: LiveSequence) -> tuple[int, int]:
    return seq.seniority
