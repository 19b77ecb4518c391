"""Keeps the plans that a runner gets, so that a test can see what was decided."""

from __future__ import annotations

from busllm.engine.runner import ModelInfo, Runner
from busllm.plan import StepPlan, StepResult


class RecordingRunner:
    """A runner around another one.

    Attributes:
        plans: all launched ones.
        num_collected: how many of them have been collected.
    """

    def __init__(self, runner: Runner) -> None:
        self.plans: list[StepPlan] = []
        self.num_collected = 0
        self._runner = runner

    @property
    def model(self) -> ModelInfo:
        """The model of the runner inside."""
        return self._runner.model

    @property
    def depth(self) -> int:
        """The depth of the runner inside."""
        return self._runner.depth

    @property
    def num_computed_tokens(self) -> int:
        """Input tokens of all rows so far."""
        return sum(row.num_tokens for plan in self.plans for row in plan.rows)

    def allocate(self, *, num_pages: int, page_tokens: int, max_running: int, max_context_tokens: int) -> None:
        """See `Runner.allocate`."""
        self._runner.allocate(
            num_pages=num_pages,
            page_tokens=page_tokens,
            max_running=max_running,
            max_context_tokens=max_context_tokens,
        )

    def prefault_memory(self) -> bool:
        """See `Runner.prefault_memory`."""
        return self._runner.prefault_memory()

    def launch(self, plan: StepPlan) -> int:
        """See `Runner.launch`."""
        self.plans.append(plan)
        return self._runner.launch(plan)

    def collect(self, handle: int) -> StepResult:
        """See `Runner.collect`."""
        self.num_collected += 1
        return self._runner.collect(handle)

    def close(self) -> None:
        """See `Runner.close`."""
        self._runner.close()
