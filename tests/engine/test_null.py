"""The runner without a model: anybody can say what it answers."""

from __future__ import annotations

import time

import pytest

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.null import NULL_EOS_TOKEN_ID, NULL_VOCAB_SIZE, NullRunner, NullSequence
from busllm.errors import EngineError
from busllm.plan import PagesAssigned, PlanRow, SlotOpened, StepPlan
from busllm.sampling import SamplingParams
from busllm.testing.engine_driver import EngineDriver, sequence_request

PROMPT = bytes(4 * 5)


def answer(prompt: bytes = PROMPT, seed: int = 1, eos_one_in: int | None = None, min_tokens: int = 0) -> list[int]:
    sequence = NullSequence(prompt, SamplingParams(min_tokens=min_tokens), seed, eos_one_in)
    first = len(prompt) // 4
    return [sequence.token(position) for position in range(first, first + 200)]


def test_the_answer_is_a_function_of_prompt_seed_and_position() -> None:
    assert answer() == answer()
    assert answer() != answer(seed=2)
    assert answer() != answer(prompt=bytes(4 * 6))
    assert len(set(answer())) > 40


def test_the_answer_is_printable_and_never_ends_unless_told_so() -> None:
    assert all(32 <= token_id <= 126 for token_id in answer())
    assert NULL_EOS_TOKEN_ID in answer(eos_one_in=10)


def test_no_end_comes_before_min_tokens() -> None:
    assert NULL_EOS_TOKEN_ID not in answer(eos_one_in=2, min_tokens=150)[:150]
    assert NULL_EOS_TOKEN_ID in answer(eos_one_in=2, min_tokens=150)


def test_no_stop_token_comes_before_min_tokens() -> None:
    stops = tuple(range(32, 126))
    sequence = NullSequence(PROMPT, SamplingParams(stop_token_ids=stops, min_tokens=20), 1, None)
    assert {sequence.token(5 + index) for index in range(20)} == {126}


def test_impossible_settings_are_an_error_and_not_a_loop() -> None:
    stops = tuple(range(NULL_VOCAB_SIZE))
    with pytest.raises(EngineError, match="every printable token"):
        NullSequence(PROMPT, SamplingParams(stop_token_ids=stops, min_tokens=1), 1, None).token(5)


def test_a_step_takes_its_time_and_steps_ahead_take_theirs_one_after_the_other() -> None:
    for depth in (0, 1):
        run = EngineDriver(Engine(NullRunner(depth=depth, step_time_s=0.01), EngineConfig(num_pages=8)))
        run.submit(sequence_request("a", [65], SamplingParams(max_tokens=5)))
        start_s = time.monotonic()
        run.run()
        assert time.monotonic() - start_s >= 5 * 0.01


def test_loading_takes_its_time() -> None:
    start_s = time.monotonic()
    Engine(NullRunner(load_time_s=0.02), EngineConfig(num_pages=8))
    assert time.monotonic() - start_s >= 0.02


def test_steps_are_collected_in_order() -> None:
    runner = NullRunner(depth=1, check_plans=False)
    runner.allocate(num_pages=1, page_tokens=4, max_running=1, max_context_tokens=8)
    opened = SlotOpened(0, SamplingParams(), 1, PROMPT[:4], 1)
    row = PlanRow(0, 0, 1, PROMPT[:4], None, True)
    plan = StepPlan(1, (row,), 0, opened=(opened,), pages=(PagesAssigned(0, 0, (0,)),))
    runner.launch(plan)
    second = runner.launch(StepPlan(2, (PlanRow(0, 1, 1, None, 1, True),), 1))
    with pytest.raises(EngineError, match="step 1 is the oldest"):
        runner.collect(second)
