"""A runner at depth 1 whose device is late: a step is computed when its result is collected, not when it is launched.

Owns: the delay. What is launched is kept as bytes, as if it were on its way.
Does not know: how steps are computed; it wraps a runner that does everything at once.

With it a loop that looks at a result before the step is collected, or changes what it launched, goes wrong visibly.
"""

from __future__ import annotations

import msgspec

from busllm.engine.runner import ModelInfo, Runner
from busllm.errors import EngineError
from busllm.plan import StepPlan, StepResult


class DeferredRunner:
    """Implements `Runner` at depth 1 on top of one at depth 0."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launched: dict[int, bytes] = {}
        self.most_launched = 0

    @property
    def model(self) -> ModelInfo:
        """That of the runner inside."""
        return self._runner.model

    @property
    def depth(self) -> int:
        """1."""
        return 1

    def allocate(self, *, num_pages: int, page_tokens: int, max_running: int, max_context_tokens: int) -> None:
        """Allocates inside."""
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
        """Keeps the plan."""
        if len(self._launched) > self.depth:
            raise EngineError(f"{len(self._launched)} steps are in flight; at depth 1 there may be two")
        self._launched[plan.number] = msgspec.msgpack.encode(plan)
        self.most_launched = max(self.most_launched, len(self._launched))
        return plan.number

    def collect(self, handle: int) -> StepResult:
        """Computes the step now; only in the order of the launches."""
        if handle != min(self._launched):
            raise EngineError(f"step {handle} is collected before step {min(self._launched)}")
        plan = msgspec.msgpack.decode(self._launched.pop(handle), type=StepPlan)
        return self._runner.collect(self._runner.launch(plan))

    def close(self) -> None:
        """Closes the runner inside."""
        self._runner.close()
