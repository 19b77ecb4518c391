"""The queue of sequences that wait for a slot and pages.

Owns: their order (by `LiveSequence.rank`) and the ones that are held out of it by back-pressure.
Does not know: when one may be admitted (`engine/admission.py`), what a rank means (`engine/planner.py`).

Leaving the queue by an abort costs nothing at once: the entry in the heap is recognised as stale when it comes up.
"""

from __future__ import annotations

import heapq

from busllm.engine.live_sequence import LiveSequence, Rank


class WaitingQueue:
    """A priority queue with removal; every operation is O(log n) or better."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, LiveSequence]] = []
        self._entries: dict[LiveSequence, int] = {}
        self._held: set[LiveSequence] = set()
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries) + len(self._held)

    def __contains__(self, seq: LiveSequence) -> bool:
        return seq in self._entries or seq in self._held

    @property
    def num_ready(self) -> int:
        """How many are not held."""
        return len(self._entries)

    def push(self, seq: LiveSequence) -> None:
        """Adds a sequence at the place of its rank, or aside while it is held."""
        if seq.held:
            self._held.add(seq)
            return
        self._num_pushed += 1
        self._entries[seq] = self._num_pushed
        heapq.heappush(self._heap, (seq.rank, self._num_pushed, seq))

    def head(self) -> LiveSequence | None:
        """The first that is not held."""
        while self._heap:
            _, number, seq = self._heap[0]
            if self._entries.get(seq) == number:
                return seq
            heapq.heappop(self._heap)
        return None

    def discard(self, seq: LiveSequence) -> None:
        """Takes a sequence out, if it is in."""
        self._held.discard(seq)
        if self._entries.pop(seq, None) is not None and len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def hold_changed(self, seq: LiveSequence) -> None:
        """Moves a queued sequence to the side that its `held` says."""
        if seq in self:
            self.discard(seq)
            self.push(seq)
