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
    """Without waiting for the prefix both hold pages of their own; the pool is large enough for one set only."""
    run = NullEngineDriver(num_pages=12, max_prefix_wait_steps=0, expected_output_tokens=0)
    for uid in ("first", "second"):
        run.submit(sequence_request(uid, text(1, 16), tokens(30)))
    run.step()
    run.engine.abort("first")
    assert run.engine.statistics().pages_owned == 8
    run.run()
    assert len(run.records["second", 0].output) == 30


def test_a_prompt_that_holds_its_twins_pages_too_starts_again_without_them() -> None:
    """Half-way through its prompt and alone, it fills the pool only because of two pages that it has twice."""
    run = NullEngineDriver(num_pages=12, step_tokens=16, expected_output_tokens=0)
    shared = text(1, 24)
    run.submit(sequence_request("long", shared + text(2, 20), tokens(4)))
    run.step()
    run.engine.hold([("long", 0)])
    run.submit(sequence_request("passes", shared + text(3, 4), tokens(30)))
    run.step()
    run.engine.hold([])
    run.step()
    run.engine.abort("passes")
    run.run()
    assert len(run.records["long", 0].output) == 4
    assert run.names("long").count("retracted") == 1


def test_a_cached_prefix_is_not_counted_as_room_for_the_sequence_that_reads_it() -> None:
    run = NullEngineDriver(num_pages=12)
    run.submit(sequence_request("warm", text(1, 24), tokens(1)))
    run.run()
    run.submit(sequence_request("runs", text(2, 8), tokens(5)))
    run.step()
    run.submit(sequence_request("reads", text(1, 24) + text(3, 12), tokens(4)))
    run.run()
    order = [(event.uid, event.name) for event in run.events]
    assert order.index(("reads", "admitted")) > order.index(("runs", "finished"))
    assert run.data("reads", "admitted")["cached_tokens"] == 24


def test_a_retracted_long_prompt_returns_before_a_short_one_that_never_ran() -> None:
    run = NullEngineDriver(num_pages=24, expected_output_tokens=0, max_running=2)
    run.submit(sequence_request("old", text(1, 4), tokens(40)))
    run.submit(sequence_request("long", text(2, 64), tokens(30)))
    run.steps_until("long", "first_token")
    run.submit(sequence_request("short", text(3, 4), tokens(2)))
    run.run()
    assert "retracted" in run.names("long")
    order = [(event.uid, event.name) for event in run.events]
    last_return = len(order) - 1 - order[::-1].index(("long", "admitted"))
    assert last_return < order.index(("short", "admitted"))


@pytest.mark.parametrize("depth", [0, 1])
def test_no_more_are_retracted_than_the_oldest_needs(depth: int) -> None:
    run = NullEngineDriver(depth, num_pages=16, expected_output_tokens=0)
    for seed, uid in enumerate(("oldest", "middle", "youngest")):
        run.submit(sequence_request(uid, text(seed, 16), tokens(17)))
    run.steps_until("youngest", "retracted")
    assert "retracted" not in run.names("middle")
    run.run()
    assert run.engine.statistics().retractions == 1


def test_of_two_retracted_the_older_returns_first() -> None:
    run = NullEngineDriver(num_pages=24, expected_output_tokens=0, max_running=3)
    run.submit(sequence_request("oldest", text(1, 4), tokens(90)))
    run.submit(sequence_request("older", text(2, 40), tokens(30)))
    run.submit(sequence_request("young", text(3, 8), tokens(60)))
    run.steps_until("older", "retracted")
    assert "retracted" in run.names("young")
    before = len(run.events)
    run.run()
    returns = [event.uid for event in run.events[before:] if event.name == "admitted"]
    assert returns[:2] == ["older", "young"]
