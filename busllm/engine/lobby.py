"""The sequences that have no slot: those in the queue, and those that wait for a prefix another one is computing.

Owns: the way between the two.
Does not know: slots, pages as a resource, who is admitted when (`engine/planner.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from busllm.engine.live_sequence import LiveSequence
from busllm.engine.page_tables import PrefixMatch
from busllm.engine.prefix_wait import PrefixWait
from busllm.engine.waiting import WaitingQueue


class Lobby:
    """Waiting sequences.

    Args:
        page_tokens: tokens per page.
        max_prefix_wait_steps: for how many steps, all together, a sequence may wait for prefixes.
    """

    def __init__(self, page_tokens: int, max_prefix_wait_steps: int) -> None:
        self._queue = WaitingQueue()
        self._prefix_wait = PrefixWait(page_tokens)
        self._max_prefix_wait_steps = max_prefix_wait_steps

    def __len__(self) -> int:
        return len(self._queue) + self.num_following

    @property
    def is_idle(self) -> bool:
        """Whether nobody could be admitted, now or after a prefix."""
        return not self._queue.num_ready and not self.num_following

    @property
    def num_following(self) -> int:
        """How many wait for a prefix."""
        return len(self._prefix_wait)

    def push(self, seq: LiveSequence) -> None:
        """Queues a sequence."""
        self._queue.push(seq)

    def head(self) -> LiveSequence | None:
        """The first in the queue."""
        return self._queue.head()

    def discard(self, seq: LiveSequence) -> None:
        """Takes a sequence out: it has ended or been admitted."""
        self._queue.discard(seq)
        self._prefix_wait.discard(seq)

    def hold_changed(self, seq: LiveSequence) -> None:
        """A sequence is held from now on, or no longer. Nobody waits for a held one."""
        self._queue.hold_changed(seq)
        if seq.held:
            self.dismiss(seq)

    def follow(self, seq: LiveSequence, match: PrefixMatch, max_pages: int, number: int) -> bool:
        """Lets the head of the queue wait for a prefix that is just being computed, if there is one.

        Args:
            match: what it has in the cache.
            max_pages: how many pages it could have there at most.
            number: of the step that is being planned.

        Returns:
            Whether it waits. Not when it has waited long enough.
        """
        until = seq.prefix_wait_until
        if until is None:
            until = number + self._max_prefix_wait_steps
        leader = self._prefix_wait.leader(seq, match, max_pages) if until > number else None
        if leader is None:
            return False
        seq.prefix_wait_until = until
        self._queue.discard(seq)
        self._prefix_wait.follow(seq, leader, match.num_pages, max_pages, until)
        return True

    def lead(self, seq: LiveSequence) -> None:
        """A running sequence goes on computing its prompt; those whose shared prefix is done return to the queue."""
        self._wake(self._prefix_wait.lead(seq))

    def dismiss(self, seq: LiveSequence) -> None:
        """A running sequence computes no prompt any more; those who waited for it return to the queue."""
        self._wake(self._prefix_wait.dismiss(seq))

    def expire(self, number: int) -> None:
        """Those who may not wait beyond step `number` return to the queue."""
        self._wake(self._prefix_wait.expired(number))

    def _wake(self, followers: Iterable[LiveSequence]) -> None:
        for seq in followers:
            self._queue.push(seq)
