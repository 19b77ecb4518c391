"""The budget of a step follows what steps have taken."""

from __future__ import annotations

import pytest

from busllm.engine.config import EngineConfig
from busllm.engine.step_budget import FIRST_TOKENS, LEAST_TOKENS, StepBudget


def budget(step_tokens: int = 1024, max_running: int = 8, limit_s: float | None = 0.1) -> StepBudget:
    return StepBudget(EngineConfig(num_pages=8, step_tokens=step_tokens, max_running=max_running, step_limit_s=limit_s))


def run(budget: StepBudget, seconds_per_token: float, steps: int = 8) -> int:
    for _ in range(steps):
        num_tokens = budget.prompt_tokens(0)
        budget.took(0, num_tokens, num_tokens * seconds_per_token)
    return budget.prompt_tokens(0)


def test_a_number_is_a_number() -> None:
    fixed = budget(300, limit_s=None)
    assert (fixed.prompt_tokens(0), run(fixed, 1.0), fixed.prompt_tokens(8)) == (300, 300, 292)


@pytest.mark.parametrize(("seconds_per_token", "tokens"), [(0.0005, 192), (0.00025, 400), (0.01, LEAST_TOKENS)])
def test_a_step_gets_as_many_tokens_as_take_a_tenth_of_a_second(seconds_per_token: float, tokens: int) -> None:
    assert budget().prompt_tokens(0) == FIRST_TOKENS
    assert run(budget(), seconds_per_token) == tokens


def test_a_step_has_no_more_tokens_than_are_ever_tried() -> None:
    measured = budget(step_tokens=512)
    assert run(measured, 1e-9) == 512
    assert measured.prompt_tokens(8) == 496


def test_decode_rows_take_their_time_out_of_a_step() -> None:
    measured = budget()
    run(measured, 0.0005)
    assert measured.prompt_tokens(8) == 176  # 192 less 8 rows, which count twice


def test_prompts_get_seven_eighths_of_a_step_within_four_limits() -> None:
    measured = budget(max_running=128)
    run(measured, 0.00025)  # 400 tokens
    assert [measured.prompt_tokens(rows) for rows in (8, 16, 32, 64, 128)] == [384, 368, 448, 896, 896]
    run(measured, 0.0005)  # 192 tokens
    assert [measured.prompt_tokens(rows) for rows in (8, 16, 32, 64, 128)] == [176, 224, 448, 640, 512]


def test_a_crowded_step_of_a_slow_machine_takes_seconds_and_not_minutes() -> None:
    measured = budget(max_running=128)
    run(measured, 0.02)
    for rows in (8, 32, 128):
        assert (measured.prompt_tokens(rows) + 2 * rows) * 0.02 <= 4 * LEAST_TOKENS * 0.02 + 0.4


def test_decode_rows_say_how_fast_steps_are_too() -> None:
    measured = budget(max_running=128)
    for _ in range(8):
        measured.took(64, 192, (64 * 2 + 192) * 0.0005)
    assert measured.prompt_tokens(0) == 192


def test_single_late_steps_and_small_ones_change_nothing() -> None:
    measured = budget()
    before = run(measured, 0.0005)
    measured.took(0, before, 5.0)
    measured.took(1, 0, 5.0)
    assert measured.prompt_tokens(0) == before


def test_steps_that_become_slower_shrink_it_at_the_second() -> None:
    measured = budget()
    before = run(measured, 0.0005)
    measured.took(0, before, 0.2)
    measured.took(0, before, 0.2)
    assert LEAST_TOKENS <= measured.prompt_tokens(0) <= before // 2
