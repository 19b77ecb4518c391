"""Who is admitted by expected pages, who is retracted when they run out, what can never fit."""

from __future__ import annotations

import pytest

from busllm.engine.sequence import FinishReason
from busllm.errors import NeverFits
from busllm.sampling import SamplingParams
from busllm.testing.engine_driver import null_outcome, sequence_request
from busllm.testing.null_engine import NullEngineDriver


def tokens(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens)


def text(seed: int, num_tokens: int) -> list[int]:
    """A prompt that shares nothing with those of other seeds."""
    return [32 + seed % 90] + [32 + (i * i + seed) % 90 for i in range(1, num_tokens)]


def test_admission_counts_on_expected_answers_not_on_max_tokens() -> None:
    """Reserving max_tokens (26 pages each) would let one run at a time."""
    run = NullEngineDriver(num_pages=30, expected_output_tokens=8)
    for seed in range(4):
        run.submit(sequence_request(f"u{seed}", text(seed, 8), tokens(96)))
    run.step()
    assert run.engine.statistics().running == 4


def test_admission_learns_from_the_answers_that_it_has_seen() -> None:
    run = NullEngineDriver(num_pages=20, expected_output_tokens=64, prefix_cache=False)
    for seed in range(60):
        run.submit(sequence_request(f"short{seed}", text(seed, 4), tokens(2)))
        run.run()
    for seed in range(3):
        run.submit(sequence_request(f"u{seed}", text(seed, 8), tokens(70)))
    run.step()
    assert run.engine.statistics().running == 3


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_tokens", [1, 2, 16])
def test_retraction_damages_no_text_and_counts_every_token_once(depth: int, page_tokens: int) -> None:
    run = NullEngineDriver(depth, num_pages=320 // page_tokens, page_tokens=page_tokens, expected_output_tokens=0)
    params = SamplingParams(max_tokens=100, logprobs=1)
    requests = [sequence_request(f"u{seed}", text(seed, 31 + seed % 3), params, seed=seed) for seed in range(10)]
    for request in requests:
        run.submit(request)
    run.run()
    statistics = run.engine.statistics()
    assert statistics.retractions > 0
    assert statistics.output_tokens == 10 * 100
    assert statistics.prompt_tokens == sum(len(request.prompt_ids) for request in requests)
    for request in requests:
        record = run.records[request.uid, 0]
        assert (record.output, record.finish_reason) == null_outcome(request, max_context_tokens=8192)
        assert len(record.logprobs) == 100


def test_the_youngest_is_retracted_and_returns_before_those_who_never_ran() -> None:
    run = NullEngineDriver(num_pages=12, expected_output_tokens=0, max_running=3)
    for seed, uid in enumerate(("oldest", "middle", "youngest", "never-ran")):
        run.submit(sequence_request(uid, text(seed, 8), tokens(24)))
    run.run()
    assert "retracted" not in run.names("oldest")
    assert "retracted" in run.names("youngest")
    admitted = [event.uid for event in run.events if event.name == "admitted"]
    assert admitted.index("never-ran") > len(admitted) - 1 - admitted[::-1].index("youngest")


def test_a_retracted_sequence_returns_to_the_pages_that_are_still_cached() -> None:
    run = NullEngineDriver(num_pages=12, expected_output_tokens=0, max_running=2)
    for seed, uid in enumerate(("old", "young")):
        run.submit(sequence_request(uid, text(seed, 16), tokens(20)))
    run.steps_until("young", "retracted")
    run.engine.abort("old")
    run.run()
    assert run.names("young") == [
        *("queued", "admitted", "prefilled", "first_token", "retracted", "admitted", "prefilled", "finished")
    ]
    assert int(run.data("young", "admitted")["cached_tokens"]) == 16


def test_a_prompt_larger_than_the_pool_is_refused_at_once() -> None:
    run = NullEngineDriver(num_pages=4)
    with pytest.raises(NeverFits) as refusal:
        run.submit(sequence_request("large", text(1, 17), tokens(1)))
    assert (refusal.value.num_tokens, refusal.value.capacity_tokens) == (17, 16)
    assert not run.engine.has_work


def test_a_prompt_that_fills_the_pool_exactly_is_served() -> None:
    run = NullEngineDriver(num_pages=4)
    for _ in range(2):  # the second time from a cache that is full of it
        run.submit(sequence_request("exact", text(1, 16), tokens(1)))
        run.run()
        assert run.records["exact", 0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [0, 1])
def test_a_sequence_that_outgrows_the_pool_ends_by_length_and_short_ones_are_served(depth: int) -> None:
    run = NullEngineDriver(depth, num_pages=8)
    run.submit(sequence_request("grows", text(1, 10), tokens(100)))
    for seed in range(2, 6):
        run.submit(sequence_request(f"u{seed}", text(seed, 8), tokens(4)))
    run.run()
    record = run.records["grows", 0]
    assert record.finish_reason is FinishReason.LENGTH
    assert len(record.output) == 8 * 4 - 10 + 1
    assert all(len(run.records[f"u{seed}", 0].output) == 4 for seed in range(2, 6))


def test_held_sequences_give_way_to_one_that_may_run() -> None:
    run = NullEngineDriver(num_pages=8, expected_output_tokens=0)
    run.submit(sequence_request("held", text(1, 24), tokens(8)))
    run.step()
    run.engine.hold([("held", 0)])
    run.submit(sequence_request("runs", text(2, 16), tokens(8)))
    run.run()
    assert len(run.records["runs", 0].output) == 8
    assert run.records["held", 0].finish_reason is None
    run.engine.hold([])
    run.run()
    assert len(run.records["held", 0].output) == 8


def test_twins_that_were_computed_apart_still_fit_when_one_is_left() -> None:
    """Without waiting for the prefix both hold pages of their own; alone, the pool is enough for one only."""
    run = NullEngineDriver(num_pages=12, max_prefix_wait_steps=0, expected_output_tokens=0)
    for uid in ("first", "second"):
        run.submit(sequence_request(uid, text(1, 16), tokens(30)))
    run.run()
    assert run.records["first", 0].output == run.records["second", 0].output
    assert len(run.records["first", 0].output) == 30
