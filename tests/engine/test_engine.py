"""The engine from outside: refusals, back-pressure, steps ahead, counts."""

from __future__ import annotations

from typing import Any

import pytest

from busllm.engine.sequence import SequenceProgress, SequenceState
from busllm.errors import ConfigError, ContextLengthExceeded, InvalidRequest, QueueFull
from busllm.sampling import SamplingParams
from busllm.testing.engine_driver import sequence_request
from busllm.testing.null_engine import NullEngineDriver

PROMPT = [ord(letter) for letter in "What is the capital of France?"]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **values})


def driver(depth: int = 0, **options: Any) -> NullEngineDriver:
    sizes = {"num_pages": 64, "step_tokens": 16, "max_running": 4, "max_waiting": 8, "max_context_tokens": 200}
    return NullEngineDriver(depth, **{**sizes, **options})


@pytest.mark.parametrize("num_tokens", [200, 201, 10_000])
def test_a_prompt_that_leaves_no_room_in_the_context_is_refused(num_tokens: int) -> None:
    with pytest.raises(ContextLengthExceeded) as refusal:
        driver().engine.submit(sequence_request("a", [65] * num_tokens))
    assert (refusal.value.num_prompt_tokens, refusal.value.max_context_tokens) == (num_tokens, 200)


def test_a_prompt_that_leaves_room_for_one_token_gets_one() -> None:
    run = driver()
    run.submit(sequence_request("a", [65] * 199, params(max_tokens=None)))
    run.run()
    assert len(run.records["a", 0].output) == 1


@pytest.mark.parametrize(
    ("prompt", "values", "param"),
    [
        ([], {}, "prompt"),
        ([65, 259], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([65], {"temperature": -1.0}, "temperature"),
        ([65], {"stop_token_ids": (259,)}, "stop_token_ids"),
    ],
)
def test_what_can_never_be_computed_is_refused_naming_the_field(
    prompt: list[int], values: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        driver().engine.submit(sequence_request("a", prompt, params(**values)))
    assert refusal.value.param == param


def test_a_full_queue_refuses_new_sequences_but_not_later_attempts() -> None:
    run = driver(max_running=1, max_waiting=1)
    for uid in "ab":
        run.submit(sequence_request(uid, PROMPT))
    with pytest.raises(QueueFull) as refusal:
        run.submit(sequence_request("c", PROMPT))
    assert (refusal.value.num_waiting, refusal.value.max_waiting) == (2, 1)
    run.submit(sequence_request("d", PROMPT, attempt=2, output=[40]))
    run.run()
    assert all(run.records[uid, 0].finish_reason for uid in "abd")
    run.submit(sequence_request("c", PROMPT))


@pytest.mark.parametrize("key", ["num_pages", "page_tokens", "step_tokens", "max_running", "max_waiting"])
def test_impossible_sizes_are_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        driver(**{key: -1})
    assert refusal.value.key == f"scheduler.{key}"


def test_a_step_must_have_room_for_every_running_sequence() -> None:
    with pytest.raises(ConfigError, match="at least max_running"):
        driver(step_tokens=3, max_running=4)


def test_held_sequences_stay_out_of_steps_until_the_next_call() -> None:
    run = driver()
    for uid in "ab":
        run.submit(sequence_request(uid, PROMPT))
    run.step_until_output("b", 2)
    held_at = len(run.records["a", 0].output)
    run.engine.hold([("a", 0), ("unknown", 0)])
    run.run()
    assert len(run.records["b", 0].output) == 8
    assert len(run.records["a", 0].output) == held_at
    assert not run.engine.has_work
    run.engine.hold([])
    assert run.engine.has_work
    run.run()
    assert len(run.records["a", 0].output) == 8


def test_a_held_sequence_is_not_admitted_and_blocks_nobody() -> None:
    run = driver(max_running=1)
    run.engine.hold([("a", 0)])
    for uid in "ab":
        run.submit(sequence_request(uid, PROMPT))
    run.run()
    assert run.records["b", 0].finish_reason is not None
    assert run.names("a") == ["queued"]
    assert run.engine.statistics().waiting == 1
    assert not run.engine.has_work


def test_a_waiting_sequence_without_a_slot_is_no_work_while_all_running_ones_are_held() -> None:
    run = driver(max_running=1)
    for uid in "ab":
        run.submit(sequence_request(uid, PROMPT))
    run.step()
    run.engine.hold([("a", 0)])
    run.run(max_steps=3)
    assert run.records["b", 0].output == []
    assert run.engine.abort("a") == 1
    run.run()
    assert len(run.records["b", 0].output) == 8


def test_letting_go_of_held_sequences_makes_work_again_even_if_a_step_found_none() -> None:
    run = driver(max_running=1)
    for uid in "ab":
        run.submit(sequence_request(uid, PROMPT))
    run.step()
    run.engine.hold([("a", 0)])
    run.run()
    run.engine.hold([])
    assert run.engine.has_work
    run.run()
    assert all(len(run.records[uid, 0].output) == 8 for uid in "ab")


def test_a_step_ahead_gives_the_same_tokens() -> None:
    outputs = []
    for depth in (0, 1):
        run = driver(depth, eos_one_in=10)
        for seed in range(12):
            run.submit(sequence_request(f"u{seed}", PROMPT[seed:], params(max_tokens=30), seed=seed))
        run.run()
        assert run.is_idle
        outputs.append({key: (record.output, record.finish_reason) for key, record in run.records.items()})
    assert outputs[0] == outputs[1]


def test_at_depth_one_the_next_step_is_launched_before_the_last_is_collected() -> None:
    run = driver(depth=1, step_tokens=64)
    runner = run.runner
    run.submit(sequence_request("a", PROMPT))
    run.step()
    assert (len(runner.plans), runner.num_collected) == (2, 1)
    assert runner.plans[1].rows[0].from_step == runner.plans[0].number
    run.run()
    assert len(runner.plans) == runner.num_collected == 8


def test_progress_and_live_tell_where_sequences_are() -> None:
    run = driver(max_running=1)
    run.submit(sequence_request("a", PROMPT, choice=0))
    run.submit(sequence_request("a", PROMPT, choice=1))
    run.submit(sequence_request("b", PROMPT, attempt=4))
    run.step_until_output("a", 2)
    assert run.engine.progress("a") == [
        SequenceProgress(0, 1, SequenceState.RUNNING, 2),
        SequenceProgress(1, 1, SequenceState.WAITING, 0),
    ]
    assert run.engine.progress("unknown") == []
    assert run.engine.live() == [("a", 1), ("b", 4)]
    run.run()
    assert run.engine.live() == []


def test_statistics_count_pages_and_tokens() -> None:
    run = driver()
    for uid in "ab":
        run.submit(sequence_request(uid, PROMPT))
        run.run()
    statistics = run.engine.statistics()
    assert statistics.pages_free + statistics.pages_cached + statistics.pages_owned == statistics.pages_total == 64
    assert statistics.pages_cached == (len(PROMPT) + 7) // 4
    assert (statistics.prompt_tokens, statistics.cached_prompt_tokens) == (2 * len(PROMPT), 28)
    assert statistics.output_tokens == 16


def test_the_cache_can_be_emptied_of_all_that_is_not_in_use() -> None:
    run = driver()
    run.submit(sequence_request("a", PROMPT))
    run.run()
    run.submit(sequence_request("b", PROMPT, params(max_tokens=20)))
    run.step()
    run.step()
    run.engine.reset_cache()
    run.engine.check_integrity()
    assert run.engine.statistics().pages_cached == 0
    run.run()
    assert len(run.records["b", 0].output) == 20
    assert run.engine.reset_cache() == (len(PROMPT) + 19) // 4
    assert run.engine.statistics().pages_free == 64
