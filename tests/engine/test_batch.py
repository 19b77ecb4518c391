"""Plans as ragged arrays."""

from __future__ import annotations

import numpy as np
import pytest

from busllm.engine.batch import SlotPages, input_tokens, make_batch
from busllm.errors import EngineError
from busllm.plan import PagesAssigned, PlanRow, StepPlan


def row(slot: int, start: int, *token_ids: int) -> PlanRow:
    return PlanRow(slot, start, len(token_ids), np.array(token_ids, dtype="<i4").tobytes(), None, True)


@pytest.fixture
def tables() -> SlotPages:
    tables = SlotPages(max_running=4, max_context_tokens=16, num_pages=20, page_tokens=4)
    tables.assign(PagesAssigned(0, 0, (7, 3)))
    tables.assign(PagesAssigned(2, 0, (5,)))
    tables.assign(PagesAssigned(3, 0, (11, 12)))
    tables.assign(PagesAssigned(3, 2, (13,)))
    return tables


def test_rows_become_offsets_positions_cache_slots_and_page_lists(tables: SlotPages) -> None:
    batch = make_batch(StepPlan(0, (row(0, 5, 90), row(2, 3, 91), row(3, 6, 1, 2, 3)), 2), tables)
    assert batch.num_rows == 3 and batch.num_tokens == 5
    assert batch.cu_seqlens.tolist() == [0, 1, 2, 5]
    assert batch.positions.tolist() == [5, 3, 6, 7, 8]
    assert batch.cache_slots.tolist() == [3 * 4 + 1, 5 * 4 + 3, 12 * 4 + 2, 12 * 4 + 3, 13 * 4]
    assert batch.kv_lengths.tolist() == [6, 4, 9]
    assert batch.indptr.tolist() == [0, 2, 3, 6]
    assert batch.indices.tolist() == [7, 3, 5, 11, 12, 13]
    assert batch.last_page_len.tolist() == [2, 4, 1]
    for array in (batch.cu_seqlens, batch.indptr, batch.indices, batch.last_page_len, batch.kv_lengths):
        assert array.dtype == np.int32


def test_input_tokens_stand_in_the_order_of_the_rows() -> None:
    by_reference = PlanRow(1, 4, 1, None, 3, True)
    assert input_tokens((row(0, 0, 5, 6), by_reference, row(2, 0, 7))).tolist() == [5, 6, 0, 7]


def test_a_cleared_slot_has_no_pages(tables: SlotPages) -> None:
    tables.clear(0)
    with pytest.raises(EngineError, match="slot 0 needs pages"):
        make_batch(StepPlan(0, (row(0, 0, 1),), 0), tables)


@pytest.mark.parametrize(
    "entry",
    [PagesAssigned(0, 3, (1,)), PagesAssigned(0, 2, (20,)), PagesAssigned(0, 2, (-1,)), PagesAssigned(0, 2, (1, 2, 4))],
    ids=["gap", "too large", "negative", "beyond the context"],
)
def test_impossible_page_entries_are_refused(tables: SlotPages, entry: PagesAssigned) -> None:
    with pytest.raises(EngineError):
        tables.assign(entry)


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(0, (PlanRow(0, 0, 2, b"\0\0\0\0", None, True),), 0),
        StepPlan(0, (PlanRow(0, 0, 0, b"", None, True),), 0),
        StepPlan(0, (row(0, 0, 1, 2),), 1),
    ],
    ids=["fewer tokens than said", "no tokens", "a long decode row"],
)
def test_impossible_rows_are_refused(tables: SlotPages, plan: StepPlan) -> None:
    with pytest.raises(EngineError):
        make_batch(plan, tables)
