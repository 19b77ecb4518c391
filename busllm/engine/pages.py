"""The pool of KV cache pages: which are free, which are in use, which only the prefix cache still names.

Owns: the free list, the reference counts (one per sequence that uses a page) and the mark "the prefix cache names it".
Every page is in exactly one state: *owned* (at least one reference), *cached* (no reference, but the mark) or *free*.
Does not know: tensors, tokens, which sequence holds a reference, which cached page is the oldest (`engine/radix.py`).
Next on the path: `engine/page_tables.py`, which gives pages to sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from busllm.errors import IntegrityError


class PagePool:
    """Reference-counted pages, numbered 0 … num_pages-1."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._cached = bytearray(num_pages)
        # A stack: the page freed last is used first, while it is still warm in a CPU's cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_owned = 0

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_owned(self) -> int:
        """Pages in use by at least one sequence."""
        return self._num_owned

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix cache names. Each of them can be evicted."""
        return self.num_pages - len(self._free) - self._num_owned

    def references(self, page: int) -> int:
        """How many references `page` has."""
        return self._references[page]

    def allocate(self, num_pages: int) -> list[int]:
        """Takes free pages; each has one reference, the caller's.

        Raises:
            IntegrityError: fewer are free. (The caller evicts first, and asks only for what there is.)
        """
        if num_pages > len(self._free):
            raise IntegrityError(f"{num_pages} pages were to be allocated, but {len(self._free)} are free")
        if num_pages == 0:
            return []
        pages = self._free[-num_pages:]
        del self._free[-num_pages:]
        for page in pages:
            self._references[page] = 1
        self._num_owned += num_pages
        return pages

    def incref(self, page: int) -> None:
        """Adds a reference to an owned or cached page.

        Raises:
            IntegrityError: the page is free, so what the caller hopes to find in it is gone.
        """
        if self._references[page] == 0:
            if not self._cached[page]:
                raise IntegrityError(f"page {page} is free and cannot be shared")
            self._num_owned += 1
        self._references[page] += 1

    def decref(self, page: int) -> int:
        """Drops a reference; without any, the page is cached if the prefix cache names it, else free.

        Returns:
            How many references are left.

        Raises:
            IntegrityError: there was none to drop.
        """
        left = self._references[page] - 1
        if left < 0:
            raise IntegrityError(f"page {page} was released more often than it was taken")
        self._references[page] = left
        if left == 0:
            self._num_owned -= 1
            if not self._cached[page]:
                self._free.append(page)
        return left

    def cache(self, page: int) -> None:
        """Marks an owned page as named by the prefix cache."""
        if self._cached[page] or self._references[page] == 0:
            raise IntegrityError(f"page {page} cannot enter the prefix cache: it is in it already, or free")
        self._cached[page] = 1

    def uncache(self, page: int) -> None:
        """Takes the mark off; the page is free if nobody uses it."""
        if not self._cached[page]:
            raise IntegrityError(f"page {page} cannot leave the prefix cache: it is not in it")
        self._cached[page] = 0
        if self._references[page] == 0:
            self._free.append(page)

    def check(self, held: Mapping[int, int], cached: Collection[int]) -> None:
        """Compares the books with what the holders say.

        Args:
            held: references per page, counted over all sequences; pages left out have none.
            cached: the pages that the prefix cache names, each once.

        Raises:
            IntegrityError: names the page and both numbers.
        """
        for page in range(self.num_pages):
            if self._references[page] != held.get(page, 0):
                raise IntegrityError(
                    f"page {page} has {self._references[page]} references, but {held.get(page, 0)} are held"
                )
        marked = {page for page in range(self.num_pages) if self._cached[page]}
        if len(cached) != len(set(cached)):
            raise IntegrityError("a page stands in the prefix cache twice")
        if marked != set(cached):
            raise IntegrityError(f"pages marked as cached and pages in the tree differ: {marked ^ set(cached)}")
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a page is free twice")
        expected = {page for page in range(self.num_pages) if not self._references[page] and not self._cached[page]}
        if free != expected:
            raise IntegrityError(f"the free list is wrong about pages {free ^ expected}")
        num_owned = sum(1 for references in self._references if references)
        if num_owned != self._num_owned:
            raise IntegrityError(f"{num_owned} pages are owned, but {self._num_owned} are counted")
