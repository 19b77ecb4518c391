"""Waiting for a prefix that a running sequence is just computing, instead of computing it twice.

Owns: which running sequence (the *leader*) computes which next page, and who waits for it (its followers).
Does not know: slots, pages as a resource. The planner bounds the wait in steps.

A page is named by the tree node before it and its tokens, so finding a leader is one look-up. A follower waits for as
many pages as it shares with its leader and is woken as soon as these are in the tree.
"""

from __future__ import annotations

import heapq

from busllm.engine.live_sequence import LiveSequence
from busllm.engine.page_tables import PrefixMatch
from busllm.engine.radix import Node

NextPage = tuple[bytes, Node | None, bytes]


class PrefixWait:
    """Leaders and followers.

    Args:
        page_tokens: tokens per page.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._leaders: dict[NextPage, LiveSequence] = {}
        self._leading: dict[LiveSequence, NextPage] = {}
        self._followers: dict[LiveSequence, dict[LiveSequence, int]] = {}  # to the pages that they wait for
        self._leader_of: dict[LiveSequence, LiveSequence] = {}
        self._expiries: list[tuple[int, int, LiveSequence]] = []
        self._num_follows = 0

    def __len__(self) -> int:
        """How many followers wait."""
        return len(self._leader_of)

    def _page(self, seq: LiveSequence, index: int) -> bytes:
        return seq.packed(index * self._page_tokens, (index + 1) * self._page_tokens)

    def lead(self, seq: LiveSequence) -> list[LiveSequence]:
        """Registers the page that a prefilling sequence completes next.

        Returns:
            Followers that need not wait any longer, because the tree has what they share with it.
        """
        self._forget(seq)
        done = seq.num_entered
        if (done + 1) * self._page_tokens <= seq.prefill_end:
            page = (seq.namespace, seq.node, self._page(seq, done))
            if self._leaders.setdefault(page, seq) is seq:
                self._leading[seq] = page
        woken = [follower for follower, num_pages in self._followers.get(seq, {}).items() if num_pages <= done]
        for follower in woken:
            self.discard(follower)
        return woken

    def dismiss(self, seq: LiveSequence) -> list[LiveSequence]:
        """The sequence leads no longer (it is done, was aborted, retracted or held); returns all its followers."""
        self._forget(seq)
        woken = list(self._followers.get(seq, ()))
        for follower in woken:
            self.discard(follower)
        return woken

    def _forget(self, seq: LiveSequence) -> None:
        page = self._leading.pop(seq, None)
        if page is not None:
            del self._leaders[page]

    def leader(self, seq: LiveSequence, match: PrefixMatch, max_pages: int) -> LiveSequence | None:
        """Who is computing the first page that `seq` misses; None when nobody is, or no such page could be shared."""
        if match.num_pages >= max_pages:
            return None
        return self._leaders.get((seq.namespace, match.node, self._page(seq, match.num_pages)))

    def follow(self, seq: LiveSequence, leader: LiveSequence, first: int, max_pages: int, until: int) -> None:
        """Makes `seq` wait for the pages that it shares with `leader`.

        Args:
            first: index of the first page that it misses.
            max_pages: how many pages it could share at most.
            until: step number at which the wait is over anyhow.
        """
        last = min(max_pages, leader.prefill_end // self._page_tokens)
        shared = first
        while shared < last and self._page(seq, shared) == self._page(leader, shared):
            shared += 1
        self._followers.setdefault(leader, {})[seq] = shared
        self._leader_of[seq] = leader
        self._num_follows += 1
        heapq.heappush(self._expiries, (until, self._num_follows, seq))

    def expired(self, number: int) -> list[LiveSequence]:
        """Followers whose wait is over at step `number`."""
        woken = []
        while self._expiries and self._expiries[0][0] <= number:
            _, _, seq = heapq.heappop(self._expiries)
            if self.discard(seq):
                woken.append(seq)
        return woken

    def discard(self, seq: LiveSequence) -> bool:
        """Takes a follower out; whether it was one."""
        leader = self._leader_of.pop(seq, None)
        if leader is None:
            return False
        followers = self._followers[leader]
        del followers[seq]
        if not followers:
            del self._followers[leader]
        return True
