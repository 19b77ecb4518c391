"""The strict executor's view: each fault that a planner could have is seen where it happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from busllm.engine.checked_pages import CheckedPages, Occupant
from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.null import NullRunner
from busllm.engine.plan_check import CheckedRunner
from busllm.errors import EngineError
from busllm.plan import PagesAssigned, PlanRow, SlotOpened, StepPlan, StepResult
from busllm.sampling import SamplingParams
from busllm.testing.engine_driver import EngineDriver, sequence_request


def pack(ids: Sequence[int]) -> bytes:
    return np.array(ids, dtype="<i4").tobytes()


def opened(slot: int, ids: Sequence[int]) -> SlotOpened:
    return SlotOpened(slot, SamplingParams(), 1, pack(ids), len(ids))


def chunk(slot: int, ids: Sequence[int], start: int = 0, *, samples: bool = True) -> PlanRow:
    return PlanRow(slot, start, len(ids), pack(ids), None, samples)


class Steps:
    """A checked null runner with 8 pages of 2 tokens and 4 slots, driven by hand."""

    def __init__(self, depth: int = 0) -> None:
        self.runner = CheckedRunner(NullRunner(depth=depth, check_plans=False))
        self.runner.allocate(num_pages=8, page_tokens=2, max_running=4, max_context_tokens=12)
        self.number = 0

    def launch(
        self,
        *rows: PlanRow,
        decodes: int = 0,
        opened: tuple[SlotOpened, ...] = (),
        closed: tuple[int, ...] = (),
        pages: tuple[tuple[int, int, tuple[int, ...]], ...] = (),
    ) -> None:
        self.number += 1
        assigned = tuple(PagesAssigned(*entry) for entry in pages)
        self.runner.launch(StepPlan(self.number, rows, decodes, opened=opened, closed=closed, pages=assigned))

    def collect(self, number: int | None = None) -> StepResult:
        return self.runner.collect(self.number if number is None else number)

    def start(self, slot: int = 0, ids: Sequence[int] = (65, 66, 67), pages: tuple[int, ...] = (0, 1)) -> int:
        """A prompt in one chunk; returns the sampled token."""
        self.launch(chunk(slot, ids), opened=(opened(slot, ids),), pages=((slot, 0, pages),))
        return self.collect().rows[0].token_ids[0]


def test_a_right_life_passes() -> None:
    steps = Steps()
    token_id = steps.start()
    steps.launch(chunk(0, [token_id], 3), decodes=1)
    token_id = steps.collect().rows[0].token_ids[0]
    steps.launch(PlanRow(0, 4, 1, None, 2, True), decodes=1, pages=((0, 2, (2,)),))
    steps.collect()
    # The next sequence shares page 0 and takes over the slot.
    steps.launch(chunk(0, [70], 2), closed=(0,), opened=(opened(0, [65, 66, 70]),), pages=((0, 0, (0, 5)),))
    steps.collect()


def wrong_position(steps: Steps) -> None:
    token_id = steps.start()
    steps.launch(chunk(0, [token_id], 4), decodes=1, pages=((0, 2, (2,)),))


def position_beyond_the_end(steps: Steps) -> None:
    steps.start()
    steps.launch(chunk(0, [65, 66], 3), pages=((0, 2, (2,)),))


def wrong_input(steps: Steps) -> None:
    token_id = steps.start()
    steps.launch(chunk(0, [token_id + 1], 3), decodes=1)


def input_from_the_wrong_step(steps: Steps) -> None:
    steps.start()
    steps.launch(PlanRow(0, 3, 1, None, 5, True), decodes=1)


def two_inputs(steps: Steps) -> None:
    token_id = steps.start()
    steps.launch(PlanRow(0, 3, 1, pack([token_id]), 1, True), decodes=1)


def sampling_before_the_end(steps: Steps) -> None:
    steps.launch(chunk(0, [65, 66]), opened=(opened(0, [65, 66, 67]),), pages=((0, 0, (0, 1)),))


def a_chunk_among_the_decodes(steps: Steps) -> None:
    steps.launch(chunk(0, [65, 66]), decodes=1, opened=(opened(0, [65, 66]),), pages=((0, 0, (0,)),))


def an_empty_chunk(steps: Steps) -> None:
    steps.launch(chunk(0, []), opened=(opened(0, [65]),), pages=((0, 0, (0,)),))


def an_empty_step(steps: Steps) -> None:
    steps.launch()


def a_lost_number(steps: Steps) -> None:
    steps.start()
    steps.number += 1
    steps.start(1)


def a_slot_that_is_not_open(steps: Steps) -> None:
    steps.launch(chunk(0, [65]))


def a_slot_opened_twice(steps: Steps) -> None:
    steps.start()
    steps.start()


def a_slot_closed_twice(steps: Steps) -> None:
    steps.start()
    steps.launch(chunk(1, [65]), closed=(0, 0), opened=(opened(1, [65]),), pages=((1, 0, (4,)),))


def a_slot_that_does_not_exist(steps: Steps) -> None:
    steps.start(4)


def two_rows_of_one_slot(steps: Steps) -> None:
    rows = (chunk(0, [65, 66], samples=False), chunk(0, [67, 68], 2))
    steps.launch(*rows, opened=(opened(0, [65, 66, 67, 68]),), pages=((0, 0, (0, 1)),))


def a_missing_page(steps: Steps) -> None:
    steps.start(pages=(0,))


def a_page_that_does_not_exist(steps: Steps) -> None:
    steps.start(pages=(0, 8))


def a_gap_in_the_table(steps: Steps) -> None:
    steps.launch(chunk(0, [65]), opened=(opened(0, [65]),), pages=((0, 1, (0,)),))


def a_replaced_entry_of_the_table(steps: Steps) -> None:
    token_id = steps.start()
    steps.launch(chunk(0, [token_id], 3), decodes=1, pages=((0, 1, (5,)),))


def a_table_that_is_too_long(steps: Steps) -> None:
    steps.start(pages=(0, 1, 2, 3, 4, 5, 6))


def one_page_written_by_two(steps: Steps) -> None:
    both = (opened(0, [65]), opened(1, [65]))
    steps.launch(chunk(0, [65]), chunk(1, [65]), opened=both, pages=((0, 0, (3,)), (1, 0, (3,))))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (wrong_position, "position 3 is next"),
        (position_beyond_the_end, "only 4 positions exist"),
        (wrong_input, "the input is"),
        (input_from_the_wrong_step, "step 5 does not sample its input"),
        (two_inputs, "two inputs"),
        (sampling_before_the_end, "samples before its end"),
        (a_chunk_among_the_decodes, "not a decode row"),
        (an_empty_chunk, "no token"),
        (an_empty_step, "has no rows"),
        (a_lost_number, "follows step 1"),
        (a_slot_that_is_not_open, "uses slot 0, which is not open"),
        (a_slot_opened_twice, "opens slot 0, which is open"),
        (a_slot_closed_twice, "closes slot 0, which is not open"),
        (a_slot_that_does_not_exist, "opens slot 4 of 4"),
        (two_rows_of_one_slot, "two rows of one slot"),
        (a_missing_page, "1 pages are assigned"),
        (a_page_that_does_not_exist, "a page that does not exist"),
        (a_gap_in_the_table, "leaves a gap"),
        (a_replaced_entry_of_the_table, "replaces entry 1"),
        (a_table_that_is_too_long, "too long"),
        (one_page_written_by_two, "which another sequence uses in step 1"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(fault: Callable[[Steps], None], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        fault(Steps())


def test_a_prefix_that_was_never_computed_is_seen() -> None:
    steps = Steps()
    steps.launch(chunk(0, [67], 2), opened=(opened(0, [65, 66, 67]),), pages=((0, 0, (0, 1)),))
    with pytest.raises(EngineError, match="relies on position 1 in page 0"):
        steps.collect()


def test_a_prefix_of_another_text_is_seen() -> None:
    steps = Steps()
    steps.start(ids=(65, 66, 67))
    steps.launch(chunk(1, [67], 2), opened=(opened(1, [65, 99, 67]),), pages=((1, 0, (0, 2)),))
    with pytest.raises(EngineError, match="slot 1 relies on position 1 in page 0"):
        steps.collect()


def test_a_page_that_was_given_to_somebody_else_too_early_is_seen() -> None:
    steps = Steps()
    token_id = steps.start(0, (65, 66, 67), (0, 1))
    steps.start(1, (70, 71), (0,))
    steps.launch(chunk(0, [token_id], 3), decodes=1)
    with pytest.raises(EngineError, match="slot 0 relies on position 1 in page 0"):
        steps.collect()


def test_a_page_that_was_right_in_earlier_steps_is_looked_into_again_when_somebody_has_written_it() -> None:
    steps = Steps()
    token_id = steps.start(0, (65, 66, 67), (0, 1))
    steps.launch(chunk(0, [token_id], 3), decodes=1)
    token_id = steps.collect().rows[0].token_ids[0]
    steps.start(1, (70, 71), (0,))
    steps.launch(chunk(0, [token_id], 4), decodes=1, pages=((0, 2, (2,)),))
    with pytest.raises(EngineError, match="slot 0 relies on position 1 in page 0"):
        steps.collect()


def test_pages_are_looked_into_once_and_not_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    holds = CheckedPages._holds

    def counted(self: CheckedPages, occupant: Occupant, position: int) -> bool:
        looks.append(position)
        return holds(self, occupant, position)

    monkeypatch.setattr(CheckedPages, "_holds", counted)
    runner = CheckedRunner(NullRunner(check_plans=False))
    run = EngineDriver(Engine(runner, EngineConfig(num_pages=64, page_tokens=4, step_tokens=8, max_running=1)))
    run.submit(sequence_request("u", [65] * 8, SamplingParams(max_tokens=100)))
    run.run()
    assert len(looks) <= 108  # at most one page per position, however many there are below it


def test_a_page_that_was_partly_written_over_is_seen() -> None:
    steps = Steps()
    token_id = steps.start(0, (65, 66, 67), (0, 1))
    steps.start(1, (65,), (0,))  # the same first token, but what stood behind it is gone
    steps.launch(chunk(0, [token_id], 3), decodes=1)
    with pytest.raises(EngineError, match="relies on position 1"):
        steps.collect()


def test_a_page_of_a_step_in_flight_must_not_be_written_by_another() -> None:
    steps = Steps(depth=1)
    steps.launch(chunk(0, [65]), opened=(opened(0, [65]),), pages=((0, 0, (3,)),))
    with pytest.raises(EngineError, match="slot 1 writes page 3, which another sequence uses in step 1"):
        steps.launch(chunk(1, [65]), opened=(opened(1, [65]),), pages=((1, 0, (3,)),))


def test_a_slot_taken_over_while_its_last_step_is_in_flight_is_another_sequence() -> None:
    steps = Steps(depth=1)
    steps.launch(chunk(0, [65]), opened=(opened(0, [65]),), pages=((0, 0, (3,)),))
    with pytest.raises(EngineError, match="slot 0 writes page 3"):
        steps.launch(chunk(0, [65]), closed=(0,), opened=(opened(0, [65]),), pages=((0, 0, (3,)),))
