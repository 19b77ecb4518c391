"""A strict executor's view of step plans, without executing them.

Owns: what a plan must satisfy before any runner may rely on it. With `checked_pages.py` it follows which page holds
which prefix at which offset, so a lost page, a stale slot, a page written while somebody else uses it or a wrong
position becomes an `EngineError` where it happens, instead of a wrong token later.
Does not know: why a row was planned. `NullRunner` has one inside; `CheckedRunner` puts one around any other runner.

Two moments. `launch` checks what can be known when a step starts, with earlier steps still in flight. `collect` checks
the contents of pages in the order in which steps run, when every input token is known.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from busllm.engine.checked_pages import CheckedPages, Occupant
from busllm.engine.runner import ModelInfo, Runner
from busllm.errors import EngineError
from busllm.plan import PagesAssigned, PlanRow, StepPlan, StepResult


class _CheckedRow(msgspec.Struct, frozen=True):
    occupant: Occupant
    row: PlanRow


class _Step(msgspec.Struct, frozen=True):
    plan: StepPlan
    rows: list[_CheckedRow]


class PlanCheck:
    """Checks plans and results in the order in which they happen.

    Args:
        num_pages, page_tokens, max_running, max_context_tokens: as given to `Runner.allocate`.
    """

    def __init__(self, *, num_pages: int, page_tokens: int, max_running: int, max_context_tokens: int) -> None:
        self._pages = CheckedPages(num_pages, page_tokens)
        self._max_running = max_running
        self._max_pages = self._pages.pages_for(max_context_tokens)
        self._occupants: dict[int, Occupant] = {}
        self._steps: deque[_Step] = deque()
        self._number: int | None = None

    # ------------------------------------------------------------ when a step starts

    def launch(self, plan: StepPlan) -> None:
        """A step is about to start.

        Raises:
            EngineError: the plan contradicts itself, or what was launched before.
        """
        if self._number is not None and plan.number != self._number + 1:
            raise _wrong(plan, f"follows step {self._number}")
        if not plan.rows:
            raise _wrong(plan, "has no rows")
        self._number = plan.number
        for slot in plan.closed:
            self._close(plan, slot)
        self._open_slots(plan)
        for assigned in plan.pages:
            self._assign(plan, assigned)
        rows = [self._check_row(plan, row, index < plan.num_decode_rows) for index, row in enumerate(plan.rows)]
        if len({row.slot for row in plan.rows}) != len(rows):
            raise _wrong(plan, "has two rows of one slot")
        self._steps.append(_Step(plan, rows))
        for checked in rows:
            self._check_written(plan, checked)

    def _close(self, plan: StepPlan, slot: int) -> None:
        occupant = self._occupants.pop(slot, None)
        if occupant is None:
            raise _wrong(plan, f"closes slot {slot}, which is not open")
        occupant.is_closed = True
        self._pages.release_if_over(occupant)

    def _open_slots(self, plan: StepPlan) -> None:
        for opened in plan.opened:
            slot = opened.slot
            if not 0 <= slot < self._max_running:
                raise _wrong(plan, f"opens slot {slot} of {self._max_running}")
            if slot in self._occupants:
                raise _wrong(plan, f"opens slot {slot}, which is open")
            self._occupants[slot] = Occupant(opened)

    def _assign(self, plan: StepPlan, assigned: PagesAssigned) -> None:
        occupant, slot = self._occupant(plan, assigned.slot), assigned.slot
        if assigned.first > len(occupant.table):
            raise _wrong(plan, f"leaves a gap in the table of slot {slot}")
        if assigned.first < len(occupant.table):
            raise _wrong(plan, f"replaces entry {assigned.first} in the table of slot {slot}")
        if not all(0 <= page < len(self._pages) for page in assigned.pages):
            raise _wrong(plan, "names a page that does not exist")
        if assigned.first + len(assigned.pages) > self._max_pages:
            raise _wrong(plan, f"makes the table of slot {slot} too long")
        self._pages.assign(occupant, assigned.pages)

    def _occupant(self, plan: StepPlan, slot: int) -> Occupant:
        occupant = self._occupants.get(slot)
        if occupant is None:
            raise _wrong(plan, f"uses slot {slot}, which is not open")
        return occupant

    def _check_row(self, plan: StepPlan, row: PlanRow, is_decode: bool) -> _CheckedRow:
        occupant = self._occupant(plan, row.slot)
        num_positions, end = occupant.num_positions, row.start + row.num_tokens
        if row.num_tokens < 1:
            raise _wrong_row(plan, row, "no token")
        if occupant.next_position is not None and row.start != occupant.next_position:
            raise _wrong_row(plan, row, f"position {occupant.next_position} is next")
        if end > num_positions:
            raise _wrong_row(plan, row, f"only {num_positions} positions exist")
        if row.samples and end != num_positions:
            raise _wrong_row(plan, row, "samples before its end")
        if is_decode and (row.num_tokens != 1 or row.start < occupant.num_prompt_tokens):
            raise _wrong_row(plan, row, "is not a decode row")
        _check_input(plan, row, occupant)
        if len(occupant.table) < self._pages.pages_for(end):
            raise _wrong_row(plan, row, f"{len(occupant.table)} pages are assigned")
        occupant.next_position = end
        occupant.num_in_flight += 1
        occupant.launched_in = plan.number
        if row.samples:
            occupant.num_sampling += 1
            occupant.sampled_in = plan.number
        return _CheckedRow(occupant, row)

    def _check_written(self, plan: StepPlan, checked: _CheckedRow) -> None:
        """A page that a row writes belongs to nobody else, in this step or in one that is still in flight."""
        row, occupant, pages = checked.row, checked.occupant, self._pages
        for page in occupant.table[row.start // pages.page_tokens : pages.pages_for(row.start + row.num_tokens)]:
            other = pages.sharer(page, occupant)
            if other is not None:
                used = f"which another sequence uses in step {other.launched_in}"
                raise _wrong(plan, f"slot {row.slot} writes page {page}, {used}")

    # ------------------------------------------------------------ when it is done

    def collect(self, result: StepResult) -> None:
        """The oldest step is done.

        Raises:
            EngineError: a row did not find in its pages what it relied on, or the result does not fit the plan.
        """
        step = self._steps.popleft()
        plan = step.plan
        if result.number != plan.number:
            raise _wrong(plan, f"gave the result of step {result.number}")
        for checked in step.rows:
            self._check_contents(plan, checked)
        for checked in step.rows:
            self._pages.write(checked.occupant, checked.row.start, checked.row.num_tokens)
        sampling = [checked for checked in step.rows if checked.row.samples]
        if [row.slot for row in result.rows] != [checked.row.slot for checked in sampling]:
            raise _wrong(plan, "other rows")
        for checked, sampled in zip(sampling, result.rows, strict=True):
            checked.occupant.num_sampling -= 1
            checked.occupant.tokens.extend(sampled.token_ids)
        for checked in step.rows:
            checked.occupant.num_in_flight -= 1
            self._pages.release_if_over(checked.occupant)

    def _check_contents(self, plan: StepPlan, checked: _CheckedRow) -> None:
        occupant, start = checked.occupant, checked.row.start
        position = self._pages.first_fault(occupant, start)
        if position is not None:
            page = occupant.table[position // self._pages.page_tokens]
            relies = f"relies on position {position} in page {page}, which holds something else"
            raise _wrong(plan, f"slot {occupant.slot} {relies}")


class CheckedRunner:
    """A runner whose plans and results are checked."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._check: PlanCheck | None = None

    @property
    def model(self) -> ModelInfo:
        """The model of the runner inside."""
        return self._runner.model

    @property
    def depth(self) -> int:
        """The depth of the runner inside."""
        return self._runner.depth

    def allocate(self, *, num_pages: int, page_tokens: int, max_running: int, max_context_tokens: int) -> None:
        """See `Runner.allocate`."""
        sizes = {"num_pages": num_pages, "page_tokens": page_tokens, "max_running": max_running}
        self._check = PlanCheck(**sizes, max_context_tokens=max_context_tokens)
        self._runner.allocate(**sizes, max_context_tokens=max_context_tokens)

    def prefault_memory(self) -> bool:
        """See `Runner.prefault_memory`."""
        return self._runner.prefault_memory()

    def launch(self, plan: StepPlan) -> int:
        """See `Runner.launch`.

        Raises:
            EngineError: the plan is wrong.
        """
        assert self._check is not None
        self._check.launch(plan)
        return self._runner.launch(plan)

    def collect(self, handle: int) -> StepResult:
        """See `Runner.collect`.

        Raises:
            EngineError: the plan was wrong, or the result is.
        """
        assert self._check is not None
        result = self._runner.collect(handle)
        self._check.collect(result)
        return result

    def close(self) -> None:
        """See `Runner.close`."""
        self._runner.close()


def _check_input(plan: StepPlan, row: PlanRow, occupant: Occupant) -> None:
    if row.token_ids is None:
        is_newest = row.num_tokens == 1 and row.start == occupant.num_positions - 1
        if not is_newest or row.from_step is None or row.from_step != occupant.sampled_in:
            raise _wrong_row(plan, row, f"step {row.from_step} does not sample its input")
        return
    if row.from_step is not None:
        raise _wrong_row(plan, row, "has two inputs")
    token_ids = np.frombuffer(row.token_ids, dtype="<i4").tolist()
    known = occupant.tokens[row.start : row.start + row.num_tokens]
    if token_ids != known:
        raise _wrong_row(plan, row, f"the input is {token_ids}, the sequence has {known}")


def _wrong(plan: StepPlan, fault: str) -> EngineError:
    return EngineError(f"step {plan.number} {fault}")


def _wrong_row(plan: StepPlan, row: PlanRow, fault: str) -> EngineError:
    return _wrong(plan, f"slot {row.slot}, positions {row.start} to {row.start + row.num_tokens - 1}: {fault}")
