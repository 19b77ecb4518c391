"""Counts which objects a piece of code looks at: a rescan shows as a number, on any machine.

Owns: the count, of the calling thread alone. Reading any attribute of an object is a look at it; passing it on, or
comparing its identity, is none.
Does not know: what the objects are.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def looked_at(kind: type) -> Iterator[Counter[int]]:
    """Counts the looks at the instances of a class that is written in Python and reads attributes as usual.

    Yields:
        Reads of attributes by `id` of the instance. Its length is the number of objects that were looked at.
    """
    seen: Counter[int] = Counter()
    own_thread = threading.get_ident()

    def read(self: object, name: str) -> Any:
        if threading.get_ident() == own_thread:
            seen[id(self)] += 1
        return object.__getattribute__(self, name)

    setattr(kind, "__getattribute__", read)  # noqa: B010 - an assignment would be one to a method
    try:
        yield seen
    finally:
        delattr(kind, "__getattribute__")
