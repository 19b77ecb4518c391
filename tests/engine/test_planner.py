"""What each step computes: decodes first, chunks of several prompts, shared prefixes once."""

from __future__ import annotations

import pytest

from busllm.sampling import SamplingParams
from busllm.testing.engine_driver import sequence_request
from busllm.testing.null_engine import NullEngineDriver


def tokens(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens)


def text(seed: int, num_tokens: int) -> list[int]:
    """A prompt that shares nothing with those of other seeds."""
    return [32 + seed % 90, 32 + seed // 90 % 90, *(32 + (i * i + seed) % 90 for i in range(2, num_tokens))]


# ---------------------------------------------------------------- the token budget


def test_running_sequences_get_a_token_in_every_step_while_a_long_prompt_is_computed() -> None:
    run = NullEngineDriver()
    run.submit(sequence_request("talks", text(1, 5), tokens(30)))
    run.step()
    run.submit(sequence_request("long", text(2, 500), tokens(1)))
    for count in range(2, 12):
        run.step()
        assert len(run.records["talks", 0].output) == count
        assert run.last_plan.num_decode_rows == 1
        assert run.last_plan.rows[0].num_tokens == 1
        assert run.last_plan.rows[1].num_tokens == 31


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("step_tokens", [20, 33, 256])
def test_no_running_sequence_is_left_out_of_a_step_while_a_prompt_of_4000_tokens_is_computed(
    depth: int, step_tokens: int
) -> None:
    """So what a stream waits for its next token is one step, however long the prompt is that came in between."""
    run = NullEngineDriver(depth, step_tokens=step_tokens, max_running=9, num_pages=2048)
    talking = [f"talks{seed}" for seed in range(8)]
    for seed, uid in enumerate(talking):
        run.submit(sequence_request(uid, text(seed, 5), tokens(2_000)))
    for _ in range(20):
        run.step()
    slots = {row.slot for row in run.last_plan.rows}
    run.submit(sequence_request("long", text(99, 4_000), tokens(1)))
    first_plan, before = len(run.runner.plans), {uid: len(run.records[uid, 0].output) for uid in talking}
    num_steps = run.steps_until("long", "first_token")
    for plan in run.runner.plans[first_plan:]:
        assert [row.num_tokens for row in plan.rows if row.slot in slots] == [1] * 8
    assert {uid: len(run.records[uid, 0].output) - before[uid] for uid in talking} == dict.fromkeys(talking, num_steps)
    assert num_steps <= -(-4_000 // (step_tokens - 8)) + 1 + depth


def test_no_step_goes_over_its_budget_and_it_is_used_up_while_there_is_work() -> None:
    run = NullEngineDriver(step_tokens=10, max_running=8)
    for seed in range(8):
        run.submit(sequence_request(f"u{seed}", text(seed, 17), tokens(3)))
    run.run()
    totals = [sum(row.num_tokens for row in plan.rows) for plan in run.runner.plans]
    assert max(totals) == 10
    assert totals[:12] == [10] * 12


def test_one_step_holds_chunks_of_several_prompts() -> None:
    run = NullEngineDriver()
    for seed in range(4):
        run.submit(sequence_request(f"u{seed}", text(seed, 8), tokens(1)))
    run.step()
    assert [row.num_tokens for row in run.last_plan.rows] == [8, 8, 8, 8]


def test_a_short_prompt_passes_a_long_one() -> None:
    run = NullEngineDriver()
    run.submit(sequence_request("long", text(1, 2_000), tokens(1)))
    run.step()
    run.submit(sequence_request("short", text(2, 20), tokens(1)))
    assert run.steps_until("short", "first_token") == 1
    assert "first_token" not in run.names("long")


def test_a_long_prompt_is_not_starved_by_an_endless_stream_of_short_ones() -> None:
    run = NullEngineDriver()
    num_chunks_alone = 20
    run.submit(sequence_request("long", text(1, 32 * num_chunks_alone), tokens(1)))
    for seed in range(200):
        run.submit(sequence_request(f"short{seed}", text(seed, 32), tokens(1)))
        run.step()
        if "first_token" in run.names("long"):
            break
    assert seed <= 6 * num_chunks_alone


def test_a_higher_priority_goes_first() -> None:
    run = NullEngineDriver(max_running=1)
    for uid, priority in (("low", 0), ("high", 1), ("highest", 2)):
        run.submit(sequence_request(uid, text(priority, 8), tokens(2), priority=priority))
    run.run()
    finished = [event.uid for event in run.events if event.name == "finished"]
    assert finished == ["highest", "high", "low"]


def test_equal_requests_are_served_in_the_order_of_arrival() -> None:
    run = NullEngineDriver(max_running=1)
    uids = [f"u{seed}" for seed in range(5)]
    for seed, uid in enumerate(uids):
        run.submit(sequence_request(uid, text(seed, 8), tokens(2)))
    run.run()
    assert [event.uid for event in run.events if event.name == "finished"] == uids


# ---------------------------------------------------------------- shared prefixes


@pytest.mark.parametrize("page_tokens", [1, 2, 16, 64])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_full_cache_hit_computes_at_least_the_last_token(page_tokens: int, extra: int) -> None:
    run = NullEngineDriver(page_tokens=page_tokens, step_tokens=200)
    prompt = text(1, 64 + extra)
    run.submit(sequence_request("first", prompt, tokens(1)))
    run.run()
    run.submit(sequence_request("again", prompt, tokens(1)))
    run.run()
    row = run.last_plan.rows[0]
    assert row.start == (len(prompt) - 1) // page_tokens * page_tokens
    assert row.start + row.num_tokens == len(prompt)
    assert run.data("again", "admitted") == {"prompt_tokens": len(prompt), "cached_tokens": row.start}
    assert run.records["again", 0].output == run.records["first", 0].output


@pytest.mark.parametrize("depth", [0, 1])
def test_equal_prompts_that_arrive_together_are_computed_once(depth: int) -> None:
    run = NullEngineDriver(depth=depth)
    prompt = text(1, 101)
    for choice in range(8):
        run.submit(sequence_request("twins", prompt, tokens(5), choice=choice, seed=choice))
    run.run()
    decode_tokens = 8 * 4
    assert run.runner.num_computed_tokens == 101 + 7 * 1 + decode_tokens
    assert len({tuple(record.output) for record in run.records.values()}) == 8


def test_a_follower_goes_on_as_soon_as_the_part_that_it_shares_is_done() -> None:
    run = NullEngineDriver()
    shared = text(1, 64)
    run.submit(sequence_request("leader", shared + text(2, 1_000), tokens(1)))
    run.step()
    run.submit(sequence_request("follower", shared + text(3, 8), tokens(1)))
    assert run.steps_until("follower", "first_token") == 2
    assert run.data("follower", "admitted")["cached_tokens"] == 64
    assert "first_token" not in run.names("leader")


def test_waiting_for_a_prefix_is_bounded() -> None:
    run = NullEngineDriver(max_prefix_wait_steps=3)
    prompt = text(1, 1_000)
    run.submit(sequence_request("leader", prompt, tokens(1)))
    run.step()
    run.submit(sequence_request("follower", prompt[:320], tokens(1)))
    assert run.steps_until("follower", "admitted") == 4
    assert run.data("follower", "admitted")["cached_tokens"] == 4 * 32
    run.run()
    assert all(record.finish_reason for record in run.records.values())


def test_followers_go_on_when_their_leader_is_aborted_and_use_what_it_has_computed() -> None:
    run = NullEngineDriver()
    prompt = text(1, 200)
    run.submit(sequence_request("leader", prompt, tokens(1)))
    run.submit(sequence_request("follower", prompt, tokens(1)))
    run.step()
    run.step()
    assert run.engine.abort("leader") == 1
    run.run()
    assert run.data("follower", "admitted")["cached_tokens"] == 64


def test_without_a_prefix_cache_everything_is_computed_and_nobody_waits() -> None:
    run = NullEngineDriver(prefix_cache=False)
    for uid in ("first", "second"):
        run.submit(sequence_request(uid, text(1, 16), tokens(1)))
    run.step()
    assert [row.num_tokens for row in run.last_plan.rows] == [16, 16]
    run.run()
    assert run.engine.statistics().pages_cached == 0


def test_namespaces_share_no_pages() -> None:
    run = NullEngineDriver()
    prompt = text(1, 33)
    for namespace in (b"alice", b"bob", b"alice"):
        run.submit(sequence_request(f"of-{namespace.decode()}", prompt, tokens(1), namespace=namespace))
        run.run()
        if namespace == b"bob":
            assert run.data("of-bob", "admitted")["cached_tokens"] == 0
    assert run.data("of-alice", "admitted")["cached_tokens"] == 32


def test_a_crowd_of_equal_prompts_is_served_whatever_the_number_of_slots() -> None:
    run = NullEngineDriver(max_running=3, max_waiting=100)
    for choice in range(40):
        run.submit(sequence_request("crowd", text(1, 100), tokens(2), choice=choice, seed=choice))
    run.run()
    assert all(record.finish_reason for record in run.records.values())
