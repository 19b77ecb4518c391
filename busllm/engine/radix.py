"""The prefix cache: a tree of pages whose path from the root spells the tokens that the pages hold.

Owns: the tree, the order of eviction. One node is one whole page, so a node is never split. A root is a namespace of
bytes: sequences of different namespaces never see each other's pages.
Does not know: sequences, tensors, when room is needed.
Next on the path: `engine/page_tables.py`.

Locking. A sequence that uses a node holds one reference (in the `PagePool`) on that node's page and on every page above
it. So a parent has at least the references of each child, a page without references has none below it either, and every
cached page can be evicted.

Order of eviction. Pages without references stand in a list. Releasing walks from the deepest node up and appends, so a
child always stands before its parent and the first of the list is a leaf: the one whose last use is longest ago. The
logical clock of this LRU is the list itself, and taking the next victim is O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from busllm.engine.pages import PagePool
from busllm.errors import IntegrityError

BYTES_PER_TOKEN = 4  # ids are packed as int32


class Node:
    """One page of a cached prefix. Outside this module: a handle."""

    __slots__ = ("children", "key", "namespace", "num_pages", "page", "parent")

    def __init__(self, namespace: bytes, parent: Node | None, key: bytes, page: int) -> None:
        self.namespace = namespace
        self.parent = parent
        self.key = key
        self.page = page
        self.num_pages: int = 1 if parent is None else parent.num_pages + 1
        self.children: dict[bytes, Node] = {}


class RadixTree:
    """Finds the pages of the longest known prefix.

    Args:
        page_tokens: tokens per page.
        pool: where the pages are counted.
    """

    def __init__(self, page_tokens: int, pool: PagePool) -> None:
        self._key_bytes = page_tokens * BYTES_PER_TOKEN
        self._pool = pool
        self._roots: dict[bytes, dict[bytes, Node]] = {}
        self._unused: OrderedDict[int, Node] = OrderedDict()

    def match(self, namespace: bytes, ids: bytes, max_pages: int) -> Node | None:
        """Finds the deepest node whose path spells a beginning of `ids`. Locks nothing.

        Args:
            namespace: the root.
            ids: packed int32 token ids.
            max_pages: depth at which the search ends.

        Returns:
            The node, or None when not even the first page is known.
        """
        width = self._key_bytes
        node = None
        children = self._roots.get(namespace, {})
        for first in range(0, max_pages * width, width):
            child = children.get(ids[first : first + width])
            if child is None:
                break
            node, children = child, child.children
        return node

    def pages(self, node: Node | None) -> list[int]:
        """The pages from the root down to `node`."""
        pages = [step.page for step in _upwards(node)]
        pages.reverse()
        return pages

    def num_unused(self, node: Node | None) -> int:
        """How many pages of that path have no reference: locking it takes so many from what can be evicted."""
        count = 0
        for step in _upwards(node):
            if self._pool.references(step.page):
                break  # every page above is referenced too
            count += 1
        return count

    def lock(self, node: Node | None) -> None:
        """Takes a reference on every page from the root to `node`."""
        for step in _upwards(node):
            if self._pool.references(step.page) == 0:
                del self._unused[step.page]
            self._pool.incref(step.page)

    def unlock(self, node: Node | None) -> None:
        """Drops the references that `lock` and `insert` left with the caller; the path is now the most recent one."""
        for step in _upwards(node):
            if self._pool.decref(step.page) == 0:
                self._unused[step.page] = step

    def insert(self, namespace: bytes, parent: Node | None, key: bytes, page: int) -> tuple[Node, bool]:
        """Adds a completed page below `parent`, which the caller has locked; the new node is locked for it as well.

        When the tree has that prefix already, a page in use stays (never taken from under a running step) and the
        caller keeps its own one, outside the tree. A page that nobody uses gives way to the caller's and is freed.

        Args:
            namespace: the root, for a first page.
            parent: node of the page before, or None.
            key: packed token ids of the page.
            page: owned by the caller, with one reference.

        Returns:
            The node, and whether it names `page` (whose reference is now the lock).
        """
        siblings = self._roots.setdefault(namespace, {}) if parent is None else parent.children
        node = siblings.get(key)
        if node is None:
            node = siblings[key] = Node(namespace, parent, key, page)
            self._pool.cache(page)
            return node, True
        if self._pool.references(node.page):
            self._pool.incref(node.page)
            return node, False
        del self._unused[node.page]
        self._pool.uncache(node.page)
        node.page = page
        self._pool.cache(page)
        return node, True

    def evict(self, num_pages: int) -> int:
        """Frees up to `num_pages` cached pages, the least recently used first.

        Returns:
            How many were freed.
        """
        count = min(num_pages, len(self._unused))
        for _ in range(count):
            _, node = self._unused.popitem(last=False)
            if node.children:
                raise IntegrityError(f"page {node.page} was to be evicted, but the tree goes on below it")
            siblings = self._roots[node.namespace] if node.parent is None else node.parent.children
            del siblings[node.key]
            if not siblings and node.parent is None:
                del self._roots[node.namespace]
            self._pool.uncache(node.page)
        return count

    def reset(self) -> int:
        """Evicts all that nobody uses; returns how many pages that were."""
        return self.evict(len(self._unused))

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents first."""
        stack = [node for children in self._roots.values() for node in children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> list[int]:
        """Checks the shape of the tree and the list of unused pages.

        Returns:
            The page of every node.

        Raises:
            IntegrityError: names the page.
        """
        pages = []
        unused = set()
        position = {page: index for index, page in enumerate(self._unused)}
        for node in self.nodes():
            pages.append(node.page)
            references = self._pool.references(node.page)
            if len(node.key) != self._key_bytes:
                raise IntegrityError(f"the node of page {node.page} has a key of {len(node.key)} bytes")
            if references == 0:
                unused.add(node.page)
            for child in node.children.values():
                if child.parent is not node or child.num_pages != node.num_pages + 1:
                    raise IntegrityError(f"the node of page {child.page} stands in the wrong place")
                if self._pool.references(child.page) > references:
                    raise IntegrityError(f"page {child.page} has more references than page {node.page} above it")
                if references == 0 and position.get(child.page, len(position)) > position.get(node.page, 0):
                    raise IntegrityError(f"page {node.page} would be evicted before page {child.page} below it")
        if unused != set(self._unused):
            raise IntegrityError(f"the list of unused pages is wrong about pages {unused ^ set(self._unused)}")
        return pages


def _upwards(node: Node | None) -> Iterator[Node]:
    while node is not None:
        parent = node.parent  # read first: the caller may change the node
        yield node
        node = parent
