"""How sequences end: limits, end-of-turn and stop tokens, nothing to generate, complete already."""

from __future__ import annotations

from typing import Any

import pytest

from busllm.engine.null import NULL_EOS_TOKEN_ID, null_logprobs
from busllm.engine.sequence import FinishReason, SequenceTokens
from busllm.sampling import SamplingParams
from busllm.testing.engine_driver import null_outcome, sequence_request
from busllm.testing.null_engine import NullEngineDriver

PROMPT = [ord(letter) for letter in "What is the capital of France?"]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **values})


def driver(depth: int = 0, **options: Any) -> NullEngineDriver:
    sizes = {"num_pages": 64, "step_tokens": 16, "max_running": 4, "max_waiting": 8, "max_context_tokens": 200}
    return NullEngineDriver(depth, **{**sizes, **options})


def test_a_sequence_ends_at_max_tokens() -> None:
    run = driver()
    request = sequence_request("a", PROMPT, params(max_tokens=5))
    run.submit(request)
    run.run()
    assert (run.records["a", 0].output, FinishReason.LENGTH) == null_outcome(request, max_context_tokens=200)
    assert run.names("a") == ["queued", "admitted", "prefilled", "first_token", "finished"]
    assert run.data("a", "finished") == {"completion_tokens": 5, "reason": "length"}
    assert run.is_idle


def test_a_sequence_without_max_tokens_ends_where_the_context_does() -> None:
    run = driver(max_context_tokens=50)
    run.submit(sequence_request("a", PROMPT, params(max_tokens=None)))
    run.submit(sequence_request("b", PROMPT, params(max_tokens=10_000)))
    run.run()
    for uid in "ab":
        assert len(run.records[uid, 0].output) == 50 - len(PROMPT)
        assert run.records[uid, 0].finish_reason is FinishReason.LENGTH


def test_an_end_of_turn_token_ends_the_sequence_and_is_part_of_it() -> None:
    run = driver(eos_one_in=6)
    run.submit(sequence_request("a", PROMPT, params(max_tokens=None)))
    run.run()
    record = run.records["a", 0]
    assert record.finish_reason is FinishReason.STOP
    assert record.output.index(NULL_EOS_TOKEN_ID) == len(record.output) - 1


def test_ignore_eos_ignores_end_of_turn_tokens_but_not_stop_tokens() -> None:
    run = driver(eos_one_in=6)
    run.submit(sequence_request("a", PROMPT, params(max_tokens=60, ignore_eos=True)))
    stops = params(max_tokens=60, ignore_eos=True, stop_token_ids=(NULL_EOS_TOKEN_ID,))
    run.submit(sequence_request("b", PROMPT, stops))
    run.run()
    assert len(run.records["a", 0].output) == 60
    assert NULL_EOS_TOKEN_ID in run.records["a", 0].output[:-1]
    assert run.records["b", 0].output[-1] == NULL_EOS_TOKEN_ID
    assert run.records["b", 0].finish_reason is FinishReason.STOP


def test_no_ending_token_comes_before_min_tokens() -> None:
    run = driver(eos_one_in=2)
    run.submit(sequence_request("a", PROMPT, params(max_tokens=60, min_tokens=30)))
    run.run()
    assert 30 < len(run.records["a", 0].output) < 60


def test_zero_tokens_end_at_once_and_compute_nothing() -> None:
    run = driver()
    run.submit(sequence_request("a", PROMPT, params(max_tokens=0)))
    assert run.engine.has_work
    output = run.step()
    assert [(entry.token_ids, entry.finish_reason) for entry in output.tokens] == [((), FinishReason.LENGTH)]
    assert run.engine.statistics().steps == 0
    assert not run.engine.has_work


@pytest.mark.parametrize("depth", [0, 1])
def test_zero_tokens_with_prompt_logprobs_score_the_prompt(depth: int) -> None:
    run = driver(depth)
    run.submit(sequence_request("a", PROMPT, params(max_tokens=0, prompt_logprobs=2)))
    run.run()
    record = run.records["a", 0]
    assert (record.output, record.finish_reason) == ([], FinishReason.LENGTH)
    assert record.prompt_logprobs == (None, *(null_logprobs(token_id, 2) for token_id in PROMPT[1:]))


def test_prompt_logprobs_come_once_with_the_first_token_however_the_prompt_is_cut() -> None:
    run = driver(step_tokens=7)
    run.submit(sequence_request("warm", PROMPT, params()))
    run.run()
    run.submit(sequence_request("a", PROMPT, params(prompt_logprobs=0, logprobs=1)))
    outputs: list[SequenceTokens] = []
    while run.engine.has_work:
        outputs += run.step().tokens
    assert [entry.prompt_logprobs is not None for entry in outputs] == [True] + [False] * 7
    assert len(outputs[0].prompt_logprobs or ()) == len(PROMPT)
    assert [entry.logprobs for entry in outputs] == [(null_logprobs(entry.token_ids[0], 1),) for entry in outputs]


def test_a_prompt_of_one_token_can_be_scored() -> None:
    run = driver()
    run.submit(sequence_request("a", [65], params(prompt_logprobs=0)))
    run.run()
    assert run.records["a", 0].prompt_logprobs == (None,)


@pytest.mark.parametrize(
    ("output", "values", "reason"),
    [
        ([40, NULL_EOS_TOKEN_ID], {}, FinishReason.STOP),
        ([40, 41], {"stop_token_ids": (41,)}, FinishReason.STOP),
        ([40, 41], {"max_tokens": 2}, FinishReason.LENGTH),
        ([40] * 170, {"max_tokens": None}, FinishReason.LENGTH),
    ],
)
def test_a_request_that_is_complete_already_ends_at_once(
    output: list[int], values: dict[str, Any], reason: FinishReason
) -> None:
    run = driver()
    run.submit(sequence_request("a", PROMPT, params(**values), attempt=2, output=output))
    (entry,) = run.step().tokens
    assert (entry.index, entry.token_ids, entry.finish_reason) == (len(output), (), reason)
    assert run.engine.statistics().steps == 0
    assert run.is_idle


def test_a_sequence_goes_on_from_the_output_of_an_earlier_attempt() -> None:
    whole = driver()
    whole.submit(sequence_request("a", PROMPT, params(max_tokens=20), seed=7))
    whole.run()
    output = whole.records["a", 0].output
    for cut in (1, 7, 19):
        rest = driver()
        settings = params(max_tokens=20, logprobs=0)
        rest.submit(sequence_request("a", PROMPT, settings, seed=7, attempt=2, output=output[:cut]))
        rest.run()
        assert rest.records["a", 0].logprobs == [null_logprobs(token_id, 0) for token_id in output[cut:]]
        assert rest.records["a", 0].output == output
        assert rest.engine.statistics().output_tokens == 20 - cut
