"""The page pool: every page is free, cached or owned, and nothing is released twice."""

from __future__ import annotations

import pytest

from busllm.engine.pages import PagePool
from busllm.errors import IntegrityError


def states(pool: PagePool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_owned


def test_a_new_pool_is_all_free() -> None:
    assert states(PagePool(4)) == (4, 0, 0)


def test_an_allocated_page_is_owned_until_its_last_reference_goes() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    assert len(set(pages)) == 3
    assert states(pool) == (1, 0, 3)
    pool.incref(pages[0])
    assert pool.decref(pages[0]) == 1
    assert states(pool) == (1, 0, 3)
    assert pool.decref(pages[0]) == 0
    assert states(pool) == (2, 0, 2)


def test_a_cached_page_is_not_free_until_it_leaves_the_cache() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.cache(page)
    pool.decref(page)
    assert states(pool) == (1, 1, 0)
    pool.incref(page)
    assert states(pool) == (1, 0, 1)
    pool.decref(page)
    pool.uncache(page)
    assert states(pool) == (2, 0, 0)


def test_a_page_that_leaves_the_cache_while_in_use_stays_with_its_user() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    pool.cache(page)
    pool.uncache(page)
    assert states(pool) == (0, 0, 1)


def test_no_pages_can_be_asked_for() -> None:
    pool = PagePool(1)
    assert pool.allocate(0) == []
    assert states(pool) == (1, 0, 0)


def test_more_pages_than_are_free_are_not_given() -> None:
    with pytest.raises(IntegrityError, match="3 pages were to be allocated, but 2 are free"):
        PagePool(2).allocate(3)


def test_a_double_release_is_an_error() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    pool.decref(page)
    with pytest.raises(IntegrityError, match="released more often"):
        pool.decref(page)


def test_a_free_page_cannot_be_shared() -> None:
    with pytest.raises(IntegrityError, match="is free and cannot be shared"):
        PagePool(1).incref(0)


def test_a_page_enters_and_leaves_the_cache_once() -> None:
    pool = PagePool(1)
    with pytest.raises(IntegrityError, match="cannot enter"):
        pool.cache(0)
    (page,) = pool.allocate(1)
    pool.cache(page)
    with pytest.raises(IntegrityError, match="cannot enter"):
        pool.cache(page)
    pool.uncache(page)
    with pytest.raises(IntegrityError, match="cannot leave"):
        pool.uncache(page)


def test_a_lost_page_is_found_by_the_integrity_check() -> None:
    pool = PagePool(3)
    kept, lost = pool.allocate(2)
    pool.check({kept: 1, lost: 1}, [])
    with pytest.raises(IntegrityError, match=f"page {lost} has 1 references, but 0 are held"):
        pool.check({kept: 1}, [])


def test_a_page_that_the_tree_forgot_is_found_by_the_integrity_check() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.cache(page)
    pool.check({page: 1}, [page])
    with pytest.raises(IntegrityError, match="differ"):
        pool.check({page: 1}, [])
    with pytest.raises(IntegrityError, match="twice"):
        pool.check({page: 1}, [page, page])
