"""A strict executor's view of step plans, without executing them.

Owns: what a plan must satisfy before any runner may rely on it. It follows which page holds which prefix at which
offset, so a lost page, a stale slot, a page written while somebody else uses it or a wrong position becomes an
`EngineError` where it happens, instead of a wrong token later.
Does not know: why a row was planned. `NullRunner` has one inside; `CheckedRunner` puts one around any other runner.

Two moments. `launch` checks what can be known when a step starts, with earlier steps still in flight. `collect` checks
the contents of pages in the order in which steps run, when every input token is known.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from busllm.engine.runner import ModelInfo, Runner
from busllm.errors import EngineError
from busllm.plan import PlanRow, SlotOpened, StepPlan, StepResult
from busllm.sampling import mix64


class _Occupant:
    """A slot between being opened and closed."""

    def __init__(self, opened: SlotOpened) -> None:
        self.slot = opened.slot
        self.tokens: list[int] = np.frombuffer(opened.token_ids, dtype="<i4").tolist()
        self.num_prompt_tokens = opened.num_prompt_tokens
        self.table: list[int] = []
        self.next_position: int | None = None
        self.num_sampling = 0
        self.sampled_in: int | None = None
        self._prefix_hashes: list[int] = []

    @property
    def num_positions(self) -> int:
        return len(self.tokens) + self.num_sampling

    def prefix_hash(self, position: int) -> int:
        """Hash of all tokens up to and including `position`."""
        hashes = self._prefix_hashes
        while len(hashes) <= position:
            before = hashes[-1] if hashes else 0
            hashes.append(mix64(before ^ mix64(self.tokens[len(hashes)] + 1)))
        return hashes[position]


class _CheckedRow(msgspec.Struct, frozen=True):
    occupant: _Occupant
    row: PlanRow
    pages: tuple[int, ...]


class _Step(msgspec.Struct, frozen=True):
    plan: StepPlan
    rows: list[_CheckedRow]
    users: dict[int, set[_Occupant]]


class PlanCheck:
    """Checks plans and results in the order in which they happen.

    Args:
        num_pages, page_tokens, max_running, max_context_tokens: as given to `Runner.allocate`.
    """

    def __init__(self, *, num_pages: int, page_tokens: int, max_running: int, max_context_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._max_running = max_running
        self._max_context_tokens = max_context_tokens
        self._occupants: dict[int, _Occupant] = {}
        # Per page, the prefix hash of each position that it holds, in order.
        self._contents: list[list[int]] = [[] for _ in range(num_pages)]
        self._steps: deque[_Step] = deque()
        self._number: int | None = None

    # ------------------------------------------------------------ when a step starts

    def launch(self, plan: StepPlan) -> None:
        """A step is about to start.

        Raises:
            EngineError: the plan contradicts itself, or what was launched before.
        """
        _require(self._number is None or plan.number == self._number + 1, plan, f"follows step {self._number}")
        _require(bool(plan.rows), plan, "has no rows")
        self._number = plan.number
        self._apply_slots(plan)
        rows = [self._check_row(plan, index) for index in range(len(plan.rows))]
        _require(len({row.occupant for row in rows}) == len(rows), plan, "has two rows of one slot")
        self._check_shared(_Step(plan, rows, self._users(rows)))

    def _apply_slots(self, plan: StepPlan) -> None:
        for slot in plan.closed:
            _require(slot in self._occupants, plan, f"closes slot {slot}, which is not open")
            del self._occupants[slot]
        for opened in plan.opened:
            slot = opened.slot
            _require(0 <= slot < self._max_running, plan, f"opens slot {slot} of {self._max_running}")
            _require(slot not in self._occupants, plan, f"opens slot {slot}, which is open")
            self._occupants[slot] = _Occupant(opened)
        max_pages = -(-self._max_context_tokens // self._page_tokens)
        for pages in plan.pages:
            occupant = self._occupant(plan, pages.slot)
            _require(pages.first <= len(occupant.table), plan, f"leaves a gap in the table of slot {pages.slot}")
            _require(
                all(0 <= page < len(self._contents) for page in pages.pages), plan, "names a page that does not exist"
            )
            occupant.table[pages.first : pages.first + len(pages.pages)] = pages.pages
            _require(len(occupant.table) <= max_pages, plan, f"makes the table of slot {pages.slot} too long")

    def _occupant(self, plan: StepPlan, slot: int) -> _Occupant:
        occupant = self._occupants.get(slot)
        if occupant is None:
            raise EngineError(f"step {plan.number} uses slot {slot}, which is not open")
        return occupant

    def _check_row(self, plan: StepPlan, index: int) -> _CheckedRow:
        row = plan.rows[index]
        occupant = self._occupant(plan, row.slot)
        end = row.start + row.num_tokens
        where = f"slot {row.slot}, positions {row.start} to {end - 1}:"
        _require(row.num_tokens >= 1, plan, f"{where} no token")
        expected = occupant.next_position
        _require(expected is None or row.start == expected, plan, f"{where} position {expected} is next")
        _require(end <= occupant.num_positions, plan, f"{where} only {occupant.num_positions} positions exist")
        _require(not row.samples or end == occupant.num_positions, plan, f"{where} samples before its end")
        if index < plan.num_decode_rows:
            is_decode = row.num_tokens == 1 and row.start >= occupant.num_prompt_tokens
            _require(is_decode, plan, f"{where} is not a decode row")
        self._check_input(plan, row, occupant, where)
        num_pages = -(-end // self._page_tokens)
        _require(len(occupant.table) >= num_pages, plan, f"{where} {len(occupant.table)} pages are assigned")
        occupant.next_position = end
        if row.samples:
            occupant.num_sampling += 1
            occupant.sampled_in = plan.number
        return _CheckedRow(occupant, row, tuple(occupant.table[:num_pages]))

    def _check_input(self, plan: StepPlan, row: PlanRow, occupant: _Occupant, where: str) -> None:
        if row.token_ids is None:
            is_newest = row.num_tokens == 1 and row.start == occupant.num_positions - 1
            is_sampled = row.from_step is not None and row.from_step == occupant.sampled_in
            _require(is_newest and is_sampled, plan, f"{where} step {row.from_step} does not sample its input")
            return
        _require(row.from_step is None, plan, f"{where} has two inputs")
        token_ids = np.frombuffer(row.token_ids, dtype="<i4").tolist()
        known = occupant.tokens[row.start : row.start + row.num_tokens]
        _require(token_ids == known, plan, f"{where} the input is {token_ids}, the sequence has {known}")

    def _users(self, rows: list[_CheckedRow]) -> dict[int, set[_Occupant]]:
        users: dict[int, set[_Occupant]] = {}
        for row in rows:
            for page in row.pages:
                users.setdefault(page, set()).add(row.occupant)
        return users

    def _check_shared(self, step: _Step) -> None:
        """A page that a row writes belongs to nobody else, in this step or in one that is still in flight."""
        self._steps.append(step)
        for row in step.rows:
            for page in row.pages[row.row.start // self._page_tokens :]:
                for other in self._steps:
                    sharers = other.users.get(page, set()) - {row.occupant}
                    _require(
                        not sharers,
                        step.plan,
                        f"slot {row.row.slot} writes page {page}, which another sequence uses in step "
                        f"{other.plan.number}",
                    )

    # ------------------------------------------------------------ when it is done

    def collect(self, result: StepResult) -> None:
        """The oldest step is done.

        Raises:
            EngineError: a row did not find in its pages what it relied on, or the result does not fit the plan.
        """
        step = self._steps.popleft()
        plan = step.plan
        _require(result.number == plan.number, plan, f"gave the result of step {result.number}")
        for checked in step.rows:
            self._check_contents(plan, checked)
        for checked in step.rows:
            self._write_contents(checked)
        sampling = [checked for checked in step.rows if checked.row.samples]
        _require([row.slot for row in result.rows] == [checked.row.slot for checked in sampling], plan, "other rows")
        for checked, sampled in zip(sampling, result.rows, strict=True):
            checked.occupant.num_sampling -= 1
            checked.occupant.tokens.extend(sampled.token_ids)

    def _check_contents(self, plan: StepPlan, checked: _CheckedRow) -> None:
        """The last position of each page below `start` stands for the page: pages are filled in order."""
        start = checked.row.start
        for index in range(-(-start // self._page_tokens)):
            last = min(start, (index + 1) * self._page_tokens) - 1
            page, offset = checked.pages[index], last % self._page_tokens
            contents = self._contents[page]
            _require(
                offset < len(contents) and contents[offset] == checked.occupant.prefix_hash(last),
                plan,
                f"slot {checked.row.slot} relies on position {last} in page {page}, which holds something else",
            )

    def _write_contents(self, checked: _CheckedRow) -> None:
        for position in range(checked.row.start, checked.row.start + checked.row.num_tokens):
            page, offset = checked.pages[position // self._page_tokens], position % self._page_tokens
            contents = self._contents[page]
            del contents[offset:]  # what stood behind belonged to an earlier use of the page
            contents.append(checked.occupant.prefix_hash(position))


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


def _require(condition: bool, plan: StepPlan, message: str) -> None:
    if not condition:
        raise EngineError(f"step {plan.number} {message}")
