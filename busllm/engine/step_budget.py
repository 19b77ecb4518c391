"""How many tokens a step may have.

Owns: what "auto" means, and the budget that follows what steps have lately taken.
Does not know: which tokens they are. A row's bits do not depend on it.
Next on the path: `engine/planner.py` fills a step up to it.
"""

from __future__ import annotations

from collections import deque

from busllm.engine.config import EngineConfig
from busllm.engine.runner import Runner

STEP_LIMIT_S = 0.1  # what prompts add to a step, so that running sequences get their next token soon
MOST_TOKENS = 1024
TOKENS_ON_DEVICE = 2048  # where steps overlap, their time is not that of their tokens
FIRST_TOKENS = 256  # before anything was measured
LEAST_TOKENS = 64
_UNIT = 16
_DECODE_TOKENS = 2  # prompt tokens that take as long as one decode row, which reads its keys and values alone
# Prompts get at least so many times what a step's decode rows take: else each token of a crowd would delay newcomers.
_LEAST_PROMPT_SHARE = 7
_MOST_LIMITS = 4  # but for no longer than so many times the limit, however slow the machine is
_RECENT = 5  # steps of which the second slowest counts: most take less than the limit, one late one changes little


def automatic_step_tokens(runner: Runner, max_running: int) -> tuple[int, float | None]:
    """What "auto" stands for: `step_tokens` and `step_limit_s` of an `EngineConfig`."""
    if runner.depth:
        return max(TOKENS_ON_DEVICE, max_running), None
    return max(MOST_TOKENS, max_running), STEP_LIMIT_S


class StepBudget:
    """Prompt tokens of the next step: the rest of `step_tokens`, or with `step_limit_s` as many as lately fitted into
    it beside the decode rows. Where many sequences decode, prompts get seven eighths of a step's time all the same,
    as far as `step_tokens` allows, and the step takes longer than the limit, up to four times.

    Args:
        config: sizes and limits.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._most = config.step_tokens
        self._limit_s = config.step_limit_s
        self._fitting: deque[float] = deque(maxlen=_RECENT)
        self._tokens = self._clamped(FIRST_TOKENS)

    def prompt_tokens(self, num_decode_rows: int) -> int:
        """How many prompt tokens a step may have beside its decode rows."""
        rest = self._most - num_decode_rows
        if self._limit_s is None:
            return rest
        beside = _DECODE_TOKENS * num_decode_rows
        least = min(_LEAST_PROMPT_SHARE * beside, _MOST_LIMITS * self._tokens - beside)
        wanted = max(self._tokens - beside, least, _UNIT)
        return min(wanted // _UNIT * _UNIT, rest)

    def took(self, num_decode_rows: int, num_prompt_tokens: int, duration_s: float) -> None:
        """Learns what a step took. Small steps say little about large ones and are passed over."""
        weight = num_prompt_tokens + _DECODE_TOKENS * num_decode_rows
        if self._limit_s is None or 2 * weight < self._tokens:
            return
        self._fitting.append(weight * self._limit_s / max(duration_s, 1e-6))
        self._tokens = self._clamped(int(sorted(self._fitting)[len(self._fitting) // _RECENT]))

    def _clamped(self, tokens: int) -> int:
        return max(min(LEAST_TOKENS, self._most), min(tokens // _UNIT * _UNIT, self._most))
