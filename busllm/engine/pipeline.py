"""The two phases of a step: launched, collected.

Owns: the steps in flight, and which result row belongs to which sequence.
Does not know: what becomes of a token (`engine/engine.py`), why a row was planned.
Next on the path: `engine/runner.py`.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec

from busllm.engine.live_sequence import LiveSequence
from busllm.engine.plan_draft import PlannedStep
from busllm.engine.planner import Planner
from busllm.engine.runner import Runner
from busllm.errors import BusllmError, EngineError, InvalidRequest, ModelError
from busllm.plan import PlanRow, PromptLogprobs, SampledRow, StepResult


class LandedRow(msgspec.Struct, frozen=True):
    """A row whose step is done.

    Attributes:
        seq: whose it is; it may have ended while the step ran.
        row: what was asked for.
        sampled: what came out, if the row samples.
        prompt_logprobs: scores of prompt positions, if the row was to give them.
    """

    seq: LiveSequence
    row: PlanRow
    sampled: SampledRow | None
    prompt_logprobs: PromptLogprobs | None

    @property
    def error(self) -> BusllmError | None:
        """Why the sequence cannot go on, if it cannot."""
        if self.sampled is not None and not self.sampled.is_finite:
            return ModelError("The model computed numbers that are not finite for this request, so it cannot go on.")
        if self.sampled is None or self.sampled.failure is None:
            return None
        grammar = self.seq.request.params.grammar
        return InvalidRequest(self.sampled.failure, param=None if grammar is None else grammar.param)


class Pipeline:
    """Keeps a runner busy as deep as it allows.

    Args:
        runner: executes plans in the order of their numbers.
        planner: makes them.
    """

    def __init__(self, runner: Runner, planner: Planner) -> None:
        self._runner = runner
        self._planner = planner
        self._launched: deque[tuple[int, PlannedStep, float]] = deque()

    @property
    def num_launched(self) -> int:
        """Steps in flight."""
        return len(self._launched)

    @property
    def has_room(self) -> bool:
        """Whether one more step may be launched before the oldest is collected."""
        return len(self._launched) <= self._runner.depth

    def launch(self) -> bool:
        """Plans and launches a step; False when there is nothing to compute."""
        step = self._planner.plan(in_flight=bool(self._launched))
        if step is None:
            return False
        began = time.perf_counter()
        self._launched.append((self._runner.launch(step.plan), step, began))
        return True

    def collect(self) -> list[LandedRow]:
        """Waits for the oldest step in flight.

        Raises:
            EngineError: the result does not belong to the plan.
        """
        handle, step, began = self._launched.popleft()
        result = self._runner.collect(handle)
        if self._runner.depth == 0:
            decodes = step.plan.num_decode_rows
            prompt_tokens = sum(row.num_tokens for row in step.plan.rows[decodes:])
            self._planner.budget.took(decodes, prompt_tokens, time.perf_counter() - began)
        _check_result(step, result)
        sampled = iter(result.rows)
        scores = {entry.slot: entry for entry in result.prompt_logprobs}
        return [
            LandedRow(seq, row, next(sampled) if row.samples else None, scores.get(row.slot))
            for seq, row in zip(step.sequences, step.plan.rows, strict=True)
        ]


def _check_result(step: PlannedStep, result: StepResult) -> None:
    plan = step.plan
    if result.number != plan.number:
        raise EngineError(f"step {plan.number} was to be collected, but the runner gave step {result.number}")
    expected = [row.slot for row in plan.rows if row.samples]
    if [row.slot for row in result.rows] != expected:
        raise EngineError(f"step {plan.number} samples for the slots {expected}, the result has others")
    for row in result.rows:
        if len(row.token_ids) != 1:
            raise EngineError(f"step {plan.number}: one token per row was planned, slot {row.slot} has another number")
