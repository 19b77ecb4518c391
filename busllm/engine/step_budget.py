"""How many tokens a step may have.

Owns: what "auto" means, and the budget that follows what steps have lately taken.
Does not know: which tokens they are. A row's bits do not depend on it.
Next on the path: `engine/planner.py` fills a step up to it.
"""

from __future__ import annotations

from collections import deque

from busllm.engine.config import EngineConfig
from busllm.engine.runner import Runner

STEP_LIMIT_S = 0.1  # running sequences wait no longer for their next token while prompts are computed
MOST_TOKENS = 1024
TOKENS_ON_DEVICE = 2048  # where steps overlap, their time is not that of their tokens
FIRST_TOKENS = 256  # before anything was measured
LEAST_TOKENS = 64
_UNIT = 16
_RECENT = 5  # steps of which the second slowest counts: most take less than the limit, one late one changes little


def automatic_step_tokens(runner: Runner, max_running: int) -> tuple[int, float | None]:
    """What "auto" stands for: `step_tokens` and `step_limit_s` of an `EngineConfig`."""
    if runner.depth:
        return max(TOKENS_ON_DEVICE, max_running), None
    return max(MOST_TOKENS, max_running), STEP_LIMIT_S


class StepBudget:
    """Tokens of the next step: `step_tokens`, or with `step_limit_s` as many as lately fitted into it.

    Args:
        config: sizes and limits.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._most = config.step_tokens
        self._least = min(max(LEAST_TOKENS, config.max_running), self._most)
        self._limit_s = config.step_limit_s
        self._fitting: deque[float] = deque(maxlen=_RECENT)
        self.tokens = self._most if self._limit_s is None else self._clamped(FIRST_TOKENS)

    def took(self, num_tokens: int, duration_s: float) -> None:
        """Learns what a step took. Small steps say little about large ones and are passed over."""
        if self._limit_s is None or 2 * num_tokens < self.tokens:
            return
        self._fitting.append(num_tokens * self._limit_s / max(duration_s, 1e-6))
        self.tokens = self._clamped(int(sorted(self._fitting)[len(self._fitting) // _RECENT]))

    def _clamped(self, tokens: int) -> int:
        return max(self._least, min(tokens // _UNIT * _UNIT, self._most))
