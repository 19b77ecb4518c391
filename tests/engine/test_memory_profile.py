"""The step by which the memory beside the KV cache is measured."""

from __future__ import annotations

import pytest
import torch

from busllm.engine.attention.torch_attention import TorchAttention
from busllm.engine.config import EngineConfig
from busllm.engine.memory_profile import kv_bytes_of_share, largest_step
from busllm.engine.null import NullRunner
from busllm.errors import ConfigError
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


def test_a_runner_takes_it() -> None:
    shape = {**SMALL_LLAMA, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 1}
    runner = random_runner(shape, TorchAttention, device=torch.device("cpu"), dtype=torch.float32)
    runner.allocate(num_pages=16, page_tokens=4, max_running=4, max_context_tokens=64)
    result = runner.collect(runner.launch(largest_step(config(64, 4, 64))))
    assert [row.slot for row in result.rows] == [0, 1, 2, 3]


def test_what_is_split_among_ranks_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="kv_tokens"):
        kv_bytes_of_share(NullRunner(depth=1), 0.9, config(64, 4, 64))
