"""What the prefix cache costs, by the number of tokens in it.

Owns: a radix tree that is full of prompts that nobody uses.
Does not know: sequences, plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from bench.scaling.figure import Figure, curves
from bench.scaling.timing import cpu_us
from busllm.engine.pages import PagePool
from busllm.engine.radix import BYTES_PER_TOKEN, Node, RadixTree

CACHED_TOKENS = (10_000, 100_000, 1_000_000)
PAGE_SIZES = (16, 64)
PROMPT_TOKENS = 1_024


class FullCache:
    """A tree with its pool; prompts of `PROMPT_TOKENS`, each of its own from the first page on, fill it."""

    def __init__(self, num_tokens: int, page_tokens: int) -> None:
        self.pages_each = PROMPT_TOKENS // page_tokens
        self.page_tokens = page_tokens
        self.num_prompts = num_tokens // PROMPT_TOKENS
        self.pool = PagePool(self.num_prompts * self.pages_each)
        self.tree = RadixTree(page_tokens, self.pool)
        for number in range(self.num_prompts):
            self.store(number)

    def ids(self, number: int) -> bytes:
        """Packed tokens of a prompt."""
        page = number.to_bytes(BYTES_PER_TOKEN, "little") + bytes(BYTES_PER_TOKEN * (self.page_tokens - 1))
        return page * self.pages_each

    def store(self, number: int) -> None:
        """Puts a prompt in as a sequence does that has computed it and ends, evicting what is used least lately."""
        ids, width, node = self.ids(number), BYTES_PER_TOKEN * self.page_tokens, None
        self.tree.evict(self.pages_each - self.pool.num_free)
        pages = self.pool.allocate(self.pages_each)
        for index, page in enumerate(pages):
            node, _ = self.tree.insert(b"", node, ids[index * width : (index + 1) * width], page)
        self.tree.unlock(node)

    def find(self, number: int) -> Node | None:
        """The node of a whole prompt."""
        return self.tree.match(b"", self.ids(number), self.pages_each)


def figures() -> Iterator[Figure]:
    """Match, lock and unlock, insert and evict; per page."""
    kinds = ("match", "lock and unlock", "insert into the full cache, with eviction")
    names = [f"{kind}, pages of {page_tokens}" for page_tokens in PAGE_SIZES for kind in kinds]
    yield Figure(
        name="prefix_cache",
        title=f"The prefix cache, per page of a prompt of {PROMPT_TOKENS} tokens",
        x_label="tokens in the cache, which is full",
        y_label="µs per page",
        curves=curves(names, CACHED_TOKENS, lambda tokens: [us for size in PAGE_SIZES for us in _costs(tokens, size)]),
    )


def _costs(num_tokens: int, page_tokens: int) -> list[float]:
    cache = FullCache(num_tokens, page_tokens)
    # Prompts far apart, so that a large cache is not measured by what happens to be in the processor's.
    order = itertools.cycle([number * 7 % cache.num_prompts for number in range(cache.num_prompts)])
    node = cache.find(cache.num_prompts // 2)
    fresh = itertools.count(cache.num_prompts)

    def use() -> None:
        cache.tree.lock(node)
        cache.tree.unlock(node)

    match_us = cpu_us(lambda: cache.find(next(order)), 50)
    use_us = cpu_us(use, 50)
    store_us = cpu_us(lambda: cache.store(next(fresh)), 50)
    return [each / cache.pages_each for each in (match_us, use_us, store_us)]
