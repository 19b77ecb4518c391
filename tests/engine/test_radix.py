"""The prefix cache: whole pages, namespaces, who is evicted first, what happens to duplicates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busllm.engine.pages import PagePool
from busllm.engine.radix import Node, RadixTree
from busllm.errors import IntegrityError

PAGE_SIZES = [1, 2, 16, 64]


def pack(ids: Sequence[int]) -> bytes:
    return np.array(ids, dtype="<i4").tobytes()


class Cache:
    """A tree with its pool, filled as a sequence does it that computes everything itself."""

    def __init__(self, page_tokens: int, num_pages: int = 64) -> None:
        self.page_tokens = page_tokens
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_tokens, self.pool)

    def store(self, ids: Sequence[int], namespace: bytes = b"") -> tuple[Node | None, list[int]]:
        """Returns the locked node and the duplicates, which the caller holds."""
        node, duplicates = None, []
        for first in range(0, len(ids) - self.page_tokens + 1, self.page_tokens):
            (page,) = self.pool.allocate(1)
            node, kept = self.tree.insert(namespace, node, pack(ids[first : first + self.page_tokens]), page)
            if not kept:
                duplicates.append(page)
        return node, duplicates

    def remember(self, ids: Sequence[int], namespace: bytes = b"") -> None:
        node, duplicates = self.store(ids, namespace)
        self.tree.unlock(node)
        for page in duplicates:
            self.pool.decref(page)

    def num_known(self, ids: Sequence[int], namespace: bytes = b"") -> int:
        node = self.tree.match(namespace, pack(ids), len(ids) // self.page_tokens)
        return 0 if node is None else node.num_pages * self.page_tokens

    def check_idle(self) -> None:
        self.pool.check({}, self.tree.check())


@pytest.mark.parametrize("page_tokens", PAGE_SIZES)
def test_a_prompt_shorter_than_a_page_is_not_kept(page_tokens: int) -> None:
    cache = Cache(page_tokens)
    cache.remember(range(page_tokens - 1))
    assert cache.pool.num_free == cache.pool.num_pages
    assert cache.num_known(range(page_tokens - 1)) == 0


@pytest.mark.parametrize("page_tokens", PAGE_SIZES)
def test_prompts_that_part_at_any_position_share_the_whole_pages_before_it(page_tokens: int) -> None:
    text = list(range(3 * page_tokens))
    cache = Cache(page_tokens)
    cache.remember(text)
    for position in range(len(text)):
        other = [*text]
        other[position] = 1_000_000
        assert cache.num_known(other) == position // page_tokens * page_tokens
    cache.check_idle()


def test_a_match_goes_no_deeper_than_asked() -> None:
    cache = Cache(2)
    cache.remember(range(8))
    node = cache.tree.match(b"", pack(range(8)), 3)
    assert node is not None
    assert node.num_pages == 3
    assert len(cache.tree.pages(node)) == 3


def test_namespaces_do_not_see_each_other() -> None:
    cache = Cache(2)
    cache.remember(range(4), b"alice")
    assert cache.num_known(range(4), b"bob") == 0
    assert cache.num_known(range(4), b"") == 0
    assert cache.num_known(range(4), b"alice") == 4
    assert cache.tree.reset() == 2
    cache.check_idle()


def test_a_locked_prefix_is_never_evicted() -> None:
    cache = Cache(2, num_pages=4)
    node, _ = cache.store(range(4))
    cache.remember(range(10, 14))
    assert cache.tree.evict(100) == 2
    assert cache.num_known(range(4)) == 4
    cache.tree.unlock(node)
    assert cache.tree.evict(100) == 2
    cache.check_idle()


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    cache = Cache(1)
    cache.remember(range(5))
    for left in range(4, -1, -1):
        assert cache.tree.evict(1) == 1
        assert cache.num_known(range(5)) == left


def test_a_hot_prefix_stays_while_cold_prompts_stream_through() -> None:
    cache = Cache(2, num_pages=12)
    hot = list(range(8))
    cache.remember(hot)
    for cold in range(100, 150):
        cache.tree.evict(4 - cache.pool.num_free)
        cache.remember([cold] * 8)
        node = cache.tree.match(b"", pack(hot), 4)
        cache.tree.lock(node)
        cache.tree.unlock(node)
        assert cache.num_known(hot) == 8
    cache.check_idle()


def test_of_two_pages_with_one_content_the_tree_keeps_the_one_in_use_and_nothing_is_freed_twice() -> None:
    cache = Cache(2, num_pages=8)
    first, none = cache.store(range(4))
    second, duplicates = cache.store(range(4))
    assert none == []
    assert first is second
    assert len(duplicates) == 2
    assert not set(duplicates) & set(cache.tree.pages(first))
    assert cache.pool.num_owned == 4
    cache.tree.unlock(first)
    assert cache.pool.num_owned == 4  # the second still holds the tree's pages as well as its own
    cache.tree.unlock(second)
    for page in duplicates:
        cache.pool.decref(page)
    assert (cache.pool.num_free, cache.pool.num_cached) == (6, 2)
    cache.check_idle()


def test_a_page_that_nobody_uses_gives_way_to_the_same_content_in_use() -> None:
    cache = Cache(2, num_pages=8)
    cache.remember(range(4))
    node, duplicates = cache.store(range(4))
    assert duplicates == []
    assert cache.pool.num_free == 6
    cache.tree.unlock(node)
    cache.check_idle()


def test_what_was_computed_below_a_duplicate_is_kept_with_the_pages_above_it() -> None:
    cache = Cache(1, num_pages=8)
    short, _ = cache.store([1, 2])
    long, duplicates = cache.store([1, 2, 3])
    cache.tree.unlock(short)
    assert cache.tree.evict(8) == 0
    cache.tree.unlock(long)
    for page in duplicates:
        cache.pool.decref(page)
    assert cache.num_known([1, 2, 3]) == 3
    cache.check_idle()


def test_the_check_sees_an_unused_page_that_cannot_be_evicted() -> None:
    cache = Cache(1)
    node, _ = cache.store([1])
    assert node is not None
    cache.pool.decref(node.page)  # behind the tree's back
    with pytest.raises(IntegrityError, match="unused pages"):
        cache.tree.check()


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=20)


@given(texts, st.lists(st.integers(0, 3), min_size=20, max_size=20))
def test_eviction_takes_the_least_recently_used_ends_first(uses: list[list[int]], evictions: list[int]) -> None:
    """Against the definition: among the prefixes that no longer one continues, the one whose last use is longest ago.

    A use touches every beginning of the text, the longest one first.
    """
    cache = Cache(1, num_pages=200)
    last_use: dict[tuple[int, ...], int] = {}
    clock = 0
    for text, num_evicted in zip(uses, evictions, strict=False):
        cache.remember(text)
        for length in range(len(text), 0, -1):
            clock += 1
            last_use[tuple(text[:length])] = clock
        for _ in range(num_evicted):
            ends = [p for p in last_use if not any(q[:-1] == p for q in last_use)]
            if ends:
                del last_use[min(ends, key=last_use.__getitem__)]
        cache.tree.evict(num_evicted)
        cache.check_idle()
        assert sum(1 for _ in cache.tree.nodes()) == len(last_use)
        assert all(cache.num_known(prefix) == len(prefix) for prefix in last_use)
