"""What the ranks behind the first do.

Owns: executing rank 0's orders on this rank's part of the model, in order.
Does not know: where orders come from (`stages/rank/`), whom a row belongs to.
Next on the path: the group's door, then `engine/model_runner.py`.
"""

from __future__ import annotations

from collections import deque

from busllm.engine.parallel.group import Group
from busllm.engine.runner import ModelInfo, Runner
from busllm.plan import StepPlan


class RankWorker:
    """Executes plans.

    Args:
        runner: this rank's part of the model.
        group: all ranks; connected before the first order.
    """

    def __init__(self, runner: Runner, group: Group) -> None:
        self._runner = runner
        self._group = group
        self._launched: deque[int] = deque()
        self.num_steps = 0

    @property
    def model(self) -> ModelInfo:
        """The loaded model."""
        return self._runner.model

    def allocate(self, *, num_pages: int, page_tokens: int, max_running: int, max_context_tokens: int) -> None:
        """Makes this rank's part of the KV cache, and says so at the door."""
        self._runner.allocate(
            num_pages=num_pages,
            page_tokens=page_tokens,
            max_running=max_running,
            max_context_tokens=max_context_tokens,
        )
        self._group.enter(0)

    def plan(self, plan: StepPlan) -> None:
        """Takes part in a step. Leaves as many unfinished as the runner's depth says.

        Raises:
            EngineError: another rank is gone, or the plan contradicts what the slots hold.
        """
        self._group.enter(plan.number)
        self._launched.append(self._runner.launch(plan))
        while len(self._launched) > self._runner.depth:
            self._runner.collect(self._launched.popleft())
        self.num_steps += 1

    def close(self) -> None:
        """Leaves the group."""
        self._runner.close()
        self._group.close()
