"""Later attempts adopt a sequence or replace it; aborts and stop strings end it at any point."""

from __future__ import annotations

from typing import Any

import pytest

from busllm.engine.sequence import FinishReason
from busllm.sampling import SamplingParams
from busllm.testing.engine_driver import null_outcome, sequence_request
from busllm.testing.null_engine import NullEngineDriver

PROMPT = [ord(letter) for letter in "What is the capital of France?"]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **values})


def driver(depth: int = 0, **options: Any) -> NullEngineDriver:
    sizes = {"num_pages": 64, "step_tokens": 16, "max_running": 4, "max_waiting": 8, "max_context_tokens": 200}
    return NullEngineDriver(depth, **{**sizes, **options})


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_delivered", [0, 2, 5])
def test_a_later_attempt_of_a_running_sequence_adopts_it_and_is_sent_what_it_misses(
    depth: int, num_delivered: int
) -> None:
    run = driver(depth)
    first = sequence_request("a", PROMPT, params(max_tokens=12, logprobs=0, prompt_logprobs=0))
    run.submit(first)
    run.step_until_output("a", 5)
    delivered = run.records["a", 0].output[:num_delivered]
    prompt_tokens = run.engine.statistics().prompt_tokens
    run.submit(sequence_request("a", PROMPT, first.params, attempt=2, output=delivered))
    output = run.step()
    assert output.tokens[0].index == num_delivered
    assert all(entry.attempt == 2 for entry in output.tokens)
    run.run()
    record = run.records["a", 0]
    assert (record.output, record.finish_reason) == null_outcome(first, max_context_tokens=200)
    assert len(record.logprobs) == 12 - num_delivered
    assert (record.prompt_logprobs is not None) == (num_delivered == 0)
    assert run.engine.statistics().prompt_tokens == prompt_tokens
    assert run.names("a").count("admitted") == 1
    assert run.data("a", "adopted") == {"completion_tokens": num_delivered}


def test_a_later_attempt_of_a_waiting_sequence_adopts_it_in_its_place() -> None:
    run = driver(max_running=1)
    for uid in "abc":
        run.submit(sequence_request(uid, PROMPT))
    run.step()
    run.submit(sequence_request("b", PROMPT, attempt=3))
    run.run()
    finished = [(event.uid, event.attempt) for event in run.events if event.name == "finished"]
    assert finished == [("a", 1), ("b", 3), ("c", 1)]


def test_two_later_attempts_before_a_step_send_everything_once_under_the_last() -> None:
    run = driver()
    run.submit(sequence_request("a", PROMPT))
    run.step_until_output("a", 4)
    run.submit(sequence_request("a", PROMPT, attempt=2))
    run.submit(sequence_request("a", PROMPT, attempt=3))
    run.run()
    assert run.records["a", 0].attempt == 3
    assert len(run.records["a", 0].output) == 8


def test_a_later_attempt_replaces_an_end_that_was_not_handed_out_yet() -> None:
    run = driver()
    for attempt in (1, 2):
        run.submit(sequence_request("a", PROMPT, params(max_tokens=0), attempt=attempt))
    (entry,) = run.step().tokens
    assert (entry.attempt, entry.finish_reason) == (2, FinishReason.LENGTH)


def test_an_attempt_that_is_not_later_is_ignored() -> None:
    run = driver()
    run.submit(sequence_request("a", PROMPT, attempt=2))
    run.step()
    for attempt in (1, 2):
        run.engine.submit(sequence_request("a", PROMPT, attempt=attempt))
    run.run()
    assert run.names("a").count("queued") == 1
    assert run.records["a", 0].attempt == 2


@pytest.mark.parametrize("depth", [0, 1])
def test_a_later_attempt_with_another_history_replaces_the_sequence(depth: int) -> None:
    run = driver(depth)
    run.submit(sequence_request("a", PROMPT))
    run.step_until_output("a", 4)
    history = [*run.records["a", 0].output[:2], 33, 34, 35]
    second = sequence_request("a", PROMPT, attempt=2, output=history)
    run.submit(second)
    run.run()
    assert run.records["a", 0].output == null_outcome(second, max_context_tokens=200)[0]
    assert run.records["a", 0].output[:5] == history
    assert "adopted" not in run.names("a")
    assert run.is_idle


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_steps", range(7))
def test_an_abort_at_any_point_gives_everything_back_and_keeps_what_was_computed(depth: int, num_steps: int) -> None:
    """Steps 1 to 2 compute the prompt, later ones decode; before the first step the sequence waits."""
    run = driver(depth)
    run.submit(sequence_request("a", PROMPT, params(max_tokens=20)))
    for _ in range(num_steps):
        run.step()
    assert run.engine.abort("a") == 1
    assert run.engine.abort("a") == 0
    output = run.step()
    assert output.tokens == ()
    assert [event.name for event in output.events][-1] == "aborted"
    run.run()
    assert run.is_idle
    computed = min(16 * num_steps, len(PROMPT)) + max(0, num_steps - 2)
    assert run.engine.statistics().pages_cached == computed // 4
    run.submit(sequence_request("again", PROMPT))
    run.run()
    assert run.data("again", "admitted")["cached_tokens"] == min(computed // 4 * 4, 28)


def test_pages_of_an_aborted_sequence_are_not_given_away_while_a_step_uses_them() -> None:
    run = driver(depth=1, num_pages=8)
    run.submit(sequence_request("a", PROMPT[:16], params(max_tokens=16)))
    run.step()
    assert len(run.runner.plans) - run.runner.num_collected == 1
    assert run.engine.abort("a") == 1
    assert run.engine.statistics().pages_owned == 5
    assert run.engine.statistics().running == 0
    # Every page is needed: the planner must wait for the step in flight, as the runner's check would tell.
    run.submit(sequence_request("b", PROMPT[::-1][:30], params(max_tokens=2)))
    run.run()
    assert len(run.records["b", 0].output) == 2


def test_an_abort_hits_only_the_named_request_and_attempts() -> None:
    run = driver(max_running=2)
    for uid in "abcd":
        run.submit(sequence_request(uid, PROMPT, attempt=2))
    run.step()
    assert run.engine.abort("a", attempt=1) == 0
    assert run.engine.abort("b", attempt=2) == 1
    assert run.engine.abort("d") == 1
    assert run.engine.abort("unknown") == 0
    run.run()
    assert {uid: len(run.records[uid, 0].output) for uid in "abcd"} == {"a": 8, "b": 0, "c": 8, "d": 0}


def test_an_abort_ends_all_choices() -> None:
    run = driver()
    for choice in range(3):
        run.submit(sequence_request("a", PROMPT, choice=choice))
    run.step()
    assert run.engine.abort("a") == 3
    run.run()
    assert run.is_idle


def test_an_abort_takes_back_what_an_adoption_was_to_send() -> None:
    run = driver()
    run.submit(sequence_request("a", PROMPT))
    run.step_until_output("a", 4)
    run.submit(sequence_request("a", PROMPT, attempt=2))
    run.engine.abort("a")
    assert run.step().tokens == ()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_string_ends_its_sequence_as_finished(depth: int) -> None:
    run = driver(depth)
    for choice in range(2):
        run.submit(sequence_request("a", PROMPT, params(max_tokens=20), choice=choice, attempt=2))
    run.step_until_output("a", 3, choice=1)
    assert not run.engine.stop("a", 0, attempt=1)
    assert run.engine.stop("a", 0, attempt=2)
    assert not run.engine.stop("a", 0, attempt=2)
    run.run()
    assert run.names("a", 0)[-1] == "finished"
    assert run.data("a", "finished", 0)["reason"] == "stop"
    assert run.records["a", 0].finish_reason is None  # the detokenizer, which found it, tells the owner
    assert len(run.records["a", 1].output) == 20
    assert run.is_idle
