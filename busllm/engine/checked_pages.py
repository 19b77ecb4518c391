"""What stands in each page, who uses it and who has found in it what it relies on.

Owns: the pages' side of `plan_check.py`: one prefix hash per position that was written. A page that a sequence has
looked into once is not looked into again until somebody writes it, so a step costs the same at any context length.
Does not know: plans and their order (`plan_check.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import numpy as np

from busllm.plan import SlotOpened


class Occupant:
    """A slot between being opened and closed. Compared and hashed by identity.

    Attributes:
        slot: its number.
        tokens: prompt and output as far as they are known.
        table: its pages; they are only ever added.
        next_position: where its next row begins; None = it has had none.
        num_sampling: tokens that launched steps sample.
        sampled_in: the step that samples the newest one.
        num_in_flight: launched steps with a row of it.
        launched_in: the newest of them.
        is_closed: another sequence may have the slot.
        num_seen_pages: leading pages, all full, that held what it relies on and were not written since.
    """

    def __init__(self, opened: SlotOpened) -> None:
        self.slot = opened.slot
        self.tokens: list[int] = np.frombuffer(opened.token_ids, dtype="<i4").tolist()
        self.num_prompt_tokens = opened.num_prompt_tokens
        self.table: list[int] = []
        self.next_position: int | None = None
        self.num_sampling = 0
        self.sampled_in: int | None = None
        self.num_in_flight = 0
        self.launched_in: int | None = None
        self.is_closed = False
        self.num_seen_pages = 0
        self._prefix_hashes: list[int] = []

    @property
    def num_positions(self) -> int:
        """Positions that exist or are being sampled."""
        return len(self.tokens) + self.num_sampling

    def prefix_hash(self, position: int) -> int:
        """Hash of all tokens up to and including `position`."""
        hashes = self._prefix_hashes
        while len(hashes) <= position:
            before = hashes[-1] if hashes else 0
            hashes.append(hash((before, self.tokens[len(hashes)])))
        return hashes[position]


class CheckedPages:
    """All pages of a pool.

    Args:
        num_pages: of the pool.
        page_tokens: positions per page.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._contents: list[list[int]] = [[] for _ in range(num_pages)]
        self._users: list[set[Occupant]] = [set() for _ in range(num_pages)]
        self._seen_by: dict[int, WeakSet[Occupant]] = {}

    def __len__(self) -> int:
        return len(self._contents)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many positions."""
        return -(-num_tokens // self.page_tokens)

    def assign(self, occupant: Occupant, pages: Sequence[int]) -> None:
        """Adds pages to a table."""
        occupant.table.extend(pages)
        for page in pages:
            self._users[page].add(occupant)

    def release_if_over(self, occupant: Occupant) -> None:
        """Takes the pages of an occupant that is closed and has no step in flight."""
        if occupant.is_closed and not occupant.num_in_flight:
            for page in occupant.table:
                self._users[page].discard(occupant)

    def sharer(self, page: int, occupant: Occupant) -> Occupant | None:
        """Another one that has the page in its table and a step in flight, if there is one."""
        users = self._users[page]
        if len(users) < 2:
            return None
        return next((other for other in users if other is not occupant and other.num_in_flight), None)

    def first_fault(self, occupant: Occupant, num_positions: int) -> int | None:
        """The last position of the first page that does not hold the occupant's first `num_positions`; None = all do.

        The last position of a page stands for the page: pages are filled in order.
        """
        num_full, num_beyond = divmod(num_positions, self.page_tokens)
        for index in range(occupant.num_seen_pages, num_full):
            last = (index + 1) * self.page_tokens - 1
            if not self._holds(occupant, last):
                return last
            self._seen_by.setdefault(occupant.table[index], WeakSet()).add(occupant)
            occupant.num_seen_pages = index + 1
        return num_positions - 1 if num_beyond and not self._holds(occupant, num_positions - 1) else None

    def _holds(self, occupant: Occupant, position: int) -> bool:
        index, offset = divmod(position, self.page_tokens)
        contents = self._contents[occupant.table[index]]
        return offset < len(contents) and contents[offset] == occupant.prefix_hash(position)

    def write(self, occupant: Occupant, first: int, num_tokens: int) -> None:
        """The occupant's positions `first` … are in its pages now; what stood behind them there is gone."""
        for position in range(first, first + num_tokens):
            index, offset = divmod(position, self.page_tokens)
            page = occupant.table[index]
            contents = self._contents[page]
            if offset < len(contents):
                del contents[offset:]
                for other in self._seen_by.pop(page, ()):
                    other.num_seen_pages = 0
            contents.append(occupant.prefix_hash(position))
