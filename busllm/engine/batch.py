"""A step plan as ragged arrays: what every forward pass and attention backend reads.

Owns: `SlotPages` (which pages each slot has) and `RaggedBatch` (a step's rows, flattened).
Does not know: tensors of any library; all arrays are numpy on the host.
Next on the path: `engine/model_runner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from busllm.errors import EngineError
from busllm.plan import PagesAssigned, PlanRow, StepPlan

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class SlotPages:
    """One row of page numbers per slot: int32 (max_running, ceil(max_context_tokens / page_tokens))."""

    def __init__(
        self,
        *,
        max_running: int,
        max_context_tokens: int,
        num_pages: int,
        page_tokens: int,
    ) -> None:
        self.page_tokens = page_tokens
        self._num_pages = num_pages
        self._pages = np.zeros((max_running, -(-max_context_tokens // page_tokens)), dtype=np.int32)
        self._num_assigned = np.zeros(max_running, dtype=np.int32)

    def clear(self, slot: int) -> None:
        """Forgets a slot's pages."""
        self._num_assigned[slot] = 0

    def assign(self, entry: PagesAssigned) -> None:
        """Writes entries of a slot's row.

        Raises:
            EngineError: a gap in the row, a page that does not exist, or more pages than a context has.
        """
        end = entry.first + len(entry.pages)
        if entry.first > self._num_assigned[entry.slot] or end > self._pages.shape[1]:
            raise EngineError(
                f"pages {entry.first}:{end} of slot {entry.slot} do not follow its "
                f"{self._num_assigned[entry.slot]} pages of at most {self._pages.shape[1]}"
            )
        if any(not 0 <= page < self._num_pages for page in entry.pages):
            raise EngineError(f"slot {entry.slot} was given pages {entry.pages}; the pool has {self._num_pages}")
        self._pages[entry.slot, entry.first : end] = entry.pages
        self._num_assigned[entry.slot] = max(end, self._num_assigned[entry.slot])

    def rows(self, slots: Int64s, num_tokens: Int64s) -> tuple[Int32s, Int64s]:
        """Pages that hold the first `num_tokens` positions of each slot, one row after the other.

        Returns:
            The pages, and how many each slot has.

        Raises:
            EngineError: a slot has fewer pages than its tokens need.
        """
        num_pages = -(-num_tokens // self.page_tokens)
        is_short = num_pages > self._num_assigned[slots]
        if is_short.any():
            short = np.flatnonzero(is_short)
            slot = int(slots[short[0]])
            raise EngineError(
                f"slot {slot} needs pages for {int(num_tokens[short[0]])} tokens of {self.page_tokens} each, "
                f"but has {int(self._num_assigned[slot])}"
            )
        rows = np.repeat(slots, num_pages)
        columns = _count_within(num_pages)
        return self._pages[rows, columns], num_pages

    def cache_slots(self, slots: Int64s, positions: Int64s) -> Int64s:
        """Where each token's key and value go: page * page_tokens + offset, int64 like `positions`."""
        pages = self._pages[slots, positions // self.page_tokens].astype(np.int64)
        return pages * self.page_tokens + positions % self.page_tokens


@dataclass(frozen=True)
class RaggedBatch:
    """The rows of one step, flattened; decode rows first.

    Attributes:
        num_decode_rows: leading rows with one token each.
        slots: int64 (num_rows,), the slot of each row.
        cu_seqlens: int32 (num_rows + 1,); row r has the tokens cu_seqlens[r] : cu_seqlens[r + 1].
        positions: int64 (num_tokens,), within the token's own sequence.
        cache_slots: int64 (num_tokens,), where each token's key and value are stored.
        kv_lengths: int32 (num_rows,), tokens in the cache of each row once this step's are stored.
        indptr: int32 (num_rows + 1,); row r has the pages indices[indptr[r] : indptr[r + 1]].
        indices: int32, the rows' pages in order.
        last_page_len: int32 (num_rows,), tokens in each row's last page, 1 … page_tokens.
        page_tokens: tokens per page.
    """

    num_decode_rows: int
    slots: Int64s
    cu_seqlens: Int32s
    positions: Int64s
    cache_slots: Int64s
    kv_lengths: Int32s
    indptr: Int32s
    indices: Int32s
    last_page_len: Int32s
    page_tokens: int

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.positions)


def make_batch(plan: StepPlan, tables: SlotPages) -> RaggedBatch:
    """Flattens a plan's rows.

    Args:
        plan: with at least one row.
        tables: already updated with the plan's page entries.

    Raises:
        EngineError: a row has no tokens, or too few pages.
    """
    _check_rows(plan)
    columns = np.array([(row.slot, row.start, row.num_tokens) for row in plan.rows], dtype=np.int64)
    slots, starts, lengths = np.ascontiguousarray(columns.T)
    ends = starts + lengths
    # Of decode rows alone, each token is a row of its own.
    is_decode = plan.num_decode_rows == len(plan.rows)
    positions = starts if is_decode else np.repeat(starts, lengths) + _count_within(lengths)
    indices, num_pages = tables.rows(slots, ends)
    return RaggedBatch(
        num_decode_rows=plan.num_decode_rows,
        slots=slots,
        cu_seqlens=_from_zero(lengths),
        positions=positions,
        cache_slots=tables.cache_slots(slots if is_decode else np.repeat(slots, lengths), positions),
        kv_lengths=ends.astype(np.int32),
        indptr=_from_zero(num_pages),
        indices=indices,
        last_page_len=((ends - 1) % tables.page_tokens + 1).astype(np.int32),
        page_tokens=tables.page_tokens,
    )


def input_tokens(rows: tuple[PlanRow, ...]) -> Int64s:
    """Input tokens of all rows, int64 (num_tokens,); 0 stands where a row's token comes from a step."""
    packed = b"".join([_UNKNOWN if row.token_ids is None else row.token_ids for row in rows])
    return np.frombuffer(packed, dtype="<i4").astype(np.int64)


_UNKNOWN = b"\0\0\0\0"


def _check_rows(plan: StepPlan) -> None:
    for index, row in enumerate(plan.rows):
        given = 1 if row.token_ids is None else len(row.token_ids) // 4
        if row.num_tokens < 1 or given != row.num_tokens:
            raise EngineError(f"row {index} of step {plan.number} says {row.num_tokens} tokens and brings {given}")
        if index < plan.num_decode_rows and row.num_tokens != 1:
            raise EngineError(f"row {index} of step {plan.number} is a decode row with {row.num_tokens} tokens")


def _from_zero(lengths: Int64s) -> Int32s:
    borders = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=borders[1:])
    return borders


def _count_within(lengths: Int64s) -> Int64s:
    """0, 1, …, lengths[0] - 1, 0, 1, …, lengths[1] - 1, …"""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(before, lengths)
