"""The step by which the memory beside the KV cache is measured."""

from __future__ import annotations

import pytest
import torch

from busllm.engine.attention.torch_attention import TorchAttention
from busllm.engine.config import EngineConfig
from busllm.engine.memory_profile import UNMEASURED_BYTES, kv_bytes_of_share, largest_step, left_bytes
from busllm.engine.null import NullRunner
from busllm.errors import ConfigError
from busllm.sampling import MAX_LOGPROBS
from busllm.testing.random_runner import SMALL_LLAMA, random_runner


def config(step_tokens: int, max_running: int, max_context_tokens: int) -> EngineConfig:
    return EngineConfig(
        num_pages=1,
        page_tokens=4,
        step_tokens=step_tokens,
        max_running=max_running,
        max_context_tokens=max_context_tokens,
    )


@pytest.mark.parametrize(
    ("step_tokens", "max_running", "max_context_tokens", "lengths"),
    [
        (64, 4, 512, [1, 1, 1, 61]),
        (64, 4, 33, [1, 1, 30, 32]),
        (4, 4, 512, [1, 1, 1, 1]),
        (64, 1, 512, [64]),
        (100, 2, 33, [32, 32]),
    ],
)
def test_it_has_all_rows_and_as_many_tokens_as_fit(
    step_tokens: int, max_running: int, max_context_tokens: int, lengths: list[int]
) -> None:
    plan = largest_step(config(step_tokens, max_running, max_context_tokens))
    assert [row.num_tokens for row in plan.rows] == lengths
    assert plan.num_decode_rows == lengths.count(1)
    assert all(row.samples for row in plan.rows)
    assert all(row.start == 0 for row in plan.rows[:-1])
    assert plan.rows[-1].start + plan.rows[-1].num_tokens == max_context_tokens - 1


def test_every_row_asks_for_all_that_takes_memory_and_a_runner_gives_it() -> None:
    shape = {**SMALL_LLAMA, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 1}
    runner = random_runner(shape, TorchAttention, device=torch.device("cpu"), dtype=torch.float32)
    runner.allocate(num_pages=1, page_tokens=4, max_running=4, max_context_tokens=512)
    plan = largest_step(config(64, 4, 512))
    result = runner.collect(runner.launch(plan))
    assert [row.slot for row in result.rows] == [0, 1, 2, 3]
    assert all(len(row.logprobs[0].top) == MAX_LOGPROBS for row in result.rows)
    (prompt,) = result.prompt_logprobs
    assert len(prompt.logprobs) == plan.rows[-1].num_tokens - 1
    for opened in plan.opened:
        params = opened.params
        assert params.top_k is not None and params.top_p < 1 and params.min_p > 0
        assert params.repetition_penalty != 1 and params.presence_penalty != 0 and params.frequency_penalty != 0


@pytest.mark.parametrize("share", [0.5, 0.85, 1.0])
def test_every_share_leaves_what_steps_need_and_what_is_not_measured(share: float) -> None:
    free_bytes, needed_bytes = 20 * 2**30, 3 * 2**30
    left = left_bytes(free_bytes, share, needed_bytes, config(64, 4, 512))
    assert left == int(free_bytes * share) - needed_bytes - UNMEASURED_BYTES
    assert left + needed_bytes < free_bytes


@pytest.mark.parametrize(("free_gib", "share"), [(3, 1.0), (20, 0.1)])
def test_a_share_that_leaves_nothing_is_refused_with_what_is_needed(free_gib: int, share: float) -> None:
    with pytest.raises(ConfigError, match=rf"is {share}; of {free_gib}\.0 GiB free .* need 3\.2 GiB"):
        left_bytes(free_gib * 2**30, share, 3 * 2**30, config(64, 4, 512))


def test_what_is_split_among_ranks_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="kv_tokens"):
        kv_bytes_of_share(NullRunner(depth=1), 0.9, config(64, 4, 64))
