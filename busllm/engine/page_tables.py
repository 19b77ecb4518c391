"""Pages of sequences: which prefix a sequence can take over, how its table grows, what it gives back.

Owns: the page pool and the prefix cache, and the rules between them and a sequence's table.
Does not know: which sequence deserves a page (`engine/planner.py`), tensors.

What a sequence holds, always exactly: one reference on every page of the tree path down to its `node`; one on every
page of its table beyond that depth; one on each of its `duplicates`. `check` counts this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from busllm.engine.live_sequence import LiveSequence
from busllm.engine.pages import PagePool
from busllm.engine.radix import Node, RadixTree
from busllm.errors import IntegrityError


class PrefixMatch(msgspec.Struct, frozen=True):
    """What the prefix cache has of a sequence.

    Attributes:
        node: the deepest page, or None.
        num_pages: how many pages.
        num_unused: how many of them nobody uses now; they could be evicted until the sequence locks them.
    """

    node: Node | None
    num_pages: int
    num_unused: int


class PageTables:
    """Gives pages to sequences.

    Args:
        num_pages: size of the pool.
        page_tokens: tokens per page.
        prefix_cache: whether completed pages are kept in the tree.
    """

    def __init__(self, num_pages: int, page_tokens: int, prefix_cache: bool) -> None:
        self.page_tokens = page_tokens
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_tokens, self.pool)
        self._prefix_cache = prefix_cache

    @property
    def num_available(self) -> int:
        """Pages that can be given out: free ones, and cached ones by evicting them."""
        return self.pool.num_pages - self.pool.num_owned

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_tokens)

    def match(self, seq: LiveSequence) -> PrefixMatch:
        """Finds what is cached of a waiting sequence, in whole pages."""
        max_pages = self.max_matched_pages(seq)
        if max_pages == 0:
            return PrefixMatch(None, 0, 0)
        node = self.tree.match(seq.namespace, seq.packed(0, seq.num_tokens), max_pages)
        return PrefixMatch(node, node.num_pages if node else 0, self.tree.num_unused(node))

    def max_matched_pages(self, seq: LiveSequence) -> int:
        """How many pages of a sequence a cached prefix can cover at most.

        At least the last token is left to compute: its hidden state gives the next one. Prompt logprobs need every
        hidden state of the prompt, so they read no prefix.
        """
        if not self._prefix_cache or seq.has_to_score_prompt:
            return 0
        return (seq.num_tokens - 1) // self.page_tokens

    def open(self, seq: LiveSequence, match: PrefixMatch) -> None:
        """Locks the matched prefix and begins the sequence's table with it."""
        self.tree.lock(match.node)
        seq.node = match.node
        seq.table = self.tree.pages(match.node)
        seq.num_entered = match.num_pages
        seq.num_planned = seq.num_computed = match.num_pages * self.page_tokens

    def room(self, seq: LiveSequence) -> int:
        """How many positions the table could cover now, taking all that is available."""
        return (len(seq.table) + self.num_available) * self.page_tokens

    def grow(self, seq: LiveSequence, num_tokens: int) -> bool:
        """Makes the table cover `num_tokens` positions, evicting cached pages as needed.

        Returns:
            False, and nothing has changed, when there are too few pages.
        """
        missing = self.pages_for(num_tokens) - len(seq.table)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        self.tree.evict(missing - self.pool.num_free)
        seq.table += self.pool.allocate(missing)
        return True

    def enter(self, seq: LiveSequence) -> None:
        """Hands the whole pages that have been computed to the prefix cache; the sequence goes on using them."""
        if not self._prefix_cache:
            return
        for index in range(seq.num_entered, seq.num_computed // self.page_tokens):
            key = seq.packed(index * self.page_tokens, (index + 1) * self.page_tokens)
            page = seq.table[index]
            seq.node, kept = self.tree.insert(seq.namespace, seq.node, key, page)
            seq.num_entered = index + 1
            if not kept:
                seq.duplicates.append(page)

    def close(self, seq: LiveSequence) -> None:
        """Drops all that the sequence holds. Only when no launched step uses its pages."""
        self.tree.unlock(seq.node)
        for page in seq.table[seq.num_entered :]:
            self.pool.decref(page)
        for page in seq.duplicates:
            self.pool.decref(page)

    def check(self, sequences: Iterable[LiveSequence]) -> None:
        """Checks pool, tree and tables against each other.

        Args:
            sequences: all that hold pages.

        Raises:
            IntegrityError: says where.
        """
        held: Counter[int] = Counter()
        for seq in sequences:
            if len(set(seq.table)) != len(seq.table):
                raise IntegrityError(f"the table of {seq.key} has a page twice: {seq.table}")
            if (seq.node.num_pages if seq.node else 0) != seq.num_entered:
                raise IntegrityError(f"{seq.key} has entered {seq.num_entered} pages, its node stands elsewhere")
            if len(seq.table) < self.pages_for(seq.num_planned):
                raise IntegrityError(f"the table of {seq.key} does not cover {seq.num_planned} planned positions")
            held.update(self.tree.pages(seq.node))
            held.update(seq.table[seq.num_entered :])
            held.update(seq.duplicates)
        self.pool.check(held, self.tree.check())
