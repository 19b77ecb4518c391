"""The budget of a step follows what steps have taken."""

from __future__ import annotations

import pytest

from busllm.engine.config import EngineConfig
from busllm.engine.step_budget import FIRST_TOKENS, LEAST_TOKENS, StepBudget


def budget(step_tokens: int = 1024, max_running: int = 8, limit_s: float | None = 0.1) -> StepBudget:
    return StepBudget(EngineConfig(num_pages=8, step_tokens=step_tokens, max_running=max_running, step_limit_s=limit_s))


def run(budget: StepBudget, seconds_per_token: float, steps: int = 8) -> int:
    for _ in range(steps):
        budget.took(budget.tokens, budget.tokens * seconds_per_token)
    return budget.tokens


def test_a_number_is_a_number() -> None:
    fixed = budget(300, limit_s=None)
    assert (fixed.tokens, run(fixed, 1.0)) == (300, 300)


@pytest.mark.parametrize(("seconds_per_token", "tokens"), [(0.0005, 192), (0.00025, 400), (0.01, LEAST_TOKENS)])
def test_a_step_gets_as_many_tokens_as_take_a_tenth_of_a_second(seconds_per_token: float, tokens: int) -> None:
    assert budget().tokens == FIRST_TOKENS
    assert run(budget(), seconds_per_token) == tokens


def test_it_stays_between_one_token_per_running_sequence_and_the_most_that_is_tried() -> None:
    assert run(budget(max_running=100), 1.0) == 100
    assert run(budget(step_tokens=512), 1e-9) == 512


def test_single_late_steps_and_small_ones_change_nothing() -> None:
    measured = budget()
    before = run(measured, 0.0005)
    measured.took(measured.tokens, 5.0)
    measured.took(1, 5.0)
    assert measured.tokens == before


def test_steps_that_become_slower_shrink_it_at_the_second() -> None:
    measured = budget()
    before = run(measured, 0.0005)
    measured.took(measured.tokens, 0.2)
    measured.took(measured.tokens, 0.2)
    assert LEAST_TOKENS <= measured.tokens <= before // 2
