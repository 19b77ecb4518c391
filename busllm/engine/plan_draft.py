"""A step plan in the making.

Owns: turning decisions ("this sequence decodes", "a chunk of so many tokens") into the Structs of `busllm/plan.py`:
inputs by value or by the step that samples them, newly opened slots, new page-table entries.
Does not know: why a row was chosen (`engine/planner.py`).
Next on the path: `engine/runner.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from busllm.engine.live_sequence import LiveSequence
from busllm.plan import PagesAssigned, PlanRow, SlotOpened, StepPlan


class PlannedStep(msgspec.Struct, frozen=True):
    """A plan and whose its rows are.

    Attributes:
        plan: what the runner gets.
        sequences: one per row.
    """

    plan: StepPlan
    sequences: tuple[LiveSequence, ...]


class PlanDraft:
    """Collects rows within one token budget.

    Args:
        number: of the step.
        step_tokens: the budget.
    """

    def __init__(self, number: int, step_tokens: int) -> None:
        self.number = number
        self.budget_tokens = step_tokens
        self._rows: list[PlanRow] = []
        self._sequences: list[LiveSequence] = []
        self._opened: list[SlotOpened] = []
        self._pages: list[PagesAssigned] = []
        self._scored: list[int] = []
        self.num_decode_rows = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is no row."""
        return not self._rows

    def add_decode(self, seq: LiveSequence) -> None:
        """One token of a sequence whose prompt is complete; its pages are there. Before any chunk."""
        self.num_decode_rows += 1
        self._add(seq, 1, samples=True)

    def add_chunk(self, seq: LiveSequence, num_tokens: int) -> None:
        """The next `num_tokens` of a prompt (or of what a returning sequence has to compute again)."""
        start = seq.num_planned
        is_last = start + num_tokens == seq.prefill_end
        # The hidden state of a position predicts the next one: the prompt's last position scores nothing.
        if seq.has_to_score_prompt and start < seq.num_prompt_tokens - 1:
            self._scored.append(len(self._rows))
        self._add(seq, num_tokens, samples=is_last and seq.wants_token)

    def _add(self, seq: LiveSequence, num_tokens: int, *, samples: bool) -> None:
        assert seq.slot is not None
        start = seq.num_planned
        is_known = start + num_tokens <= seq.num_tokens
        token_ids = seq.packed(start, start + num_tokens) if is_known else None
        from_step = None if is_known else seq.sampled_in
        row = PlanRow(seq.slot, start, num_tokens, token_ids, from_step, samples)
        if not seq.opened:
            seq.opened = True
            request = seq.request
            tokens = seq.packed(0, seq.num_tokens)
            self._opened.append(SlotOpened(seq.slot, request.params, request.seed, tokens, seq.num_prompt_tokens))
        if seq.num_assigned < len(seq.table):
            pages = tuple(seq.table[seq.num_assigned :])
            self._pages.append(PagesAssigned(seq.slot, seq.num_assigned, pages))
            seq.num_assigned = len(seq.table)
        self._rows.append(row)
        self._sequences.append(seq)
        self.budget_tokens -= num_tokens
        seq.launched(row, self.number)

    def finish(self, closed: Sequence[int]) -> PlannedStep:
        """The plan; `closed` names slots whose state may be dropped."""
        plan = StepPlan(
            number=self.number,
            rows=tuple(self._rows),
            num_decode_rows=self.num_decode_rows,
            opened=tuple(self._opened),
            closed=tuple(closed),
            pages=tuple(self._pages),
            prompt_logprob_rows=tuple(self._scored),
        )
        return PlannedStep(plan, tuple(self._sequences))
