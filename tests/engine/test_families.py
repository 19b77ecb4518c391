"""Each family that has a decoder of its own: 64 tokens and all their logits are those of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from busllm.engine.loader import load_runner
from busllm.engine.models.config import read_config
from busllm.errors import ModelError
from busllm.testing.plan_driver import DrivenSequence
from busllm.testing.tiny_model import write_tiny_model
from tests.engine.logits import assert_logits_match
from tests.engine.reference import assert_matches, load_reference
from tests.engine.tiny import alone, assert_same_bits, driver, greedy, prompts

PROMPTS = prompts((1, 17, 70, 140))
LONG_CONTEXT = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 256,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 20}),
    "llama, one kv head per head": ("llama", {"num_key_value_heads": 6}),
    "llama, linear rope": ("llama", {"rope_parameters": LONG_CONTEXT | {"rope_type": "linear"}}),
    "llama, dynamic rope": ("llama", {"rope_parameters": LONG_CONTEXT | {"rope_type": "dynamic"}}),
    "llama, long rope": ("llama", {"rope_parameters": LONGROPE}),
    "llama 3 rope, untied": ("llama3-rope", {"tie_word_embeddings": False}),
    "qwen2 with yarn, tied": (
        "qwen2",
        {"rope_parameters": LONG_CONTEXT | {"rope_type": "yarn", "beta_fast": 16.0}, "tie_word_embeddings": True},
    ),
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2, upper layers windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    "qwen3, first layer windowed": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "qwen3, tied, biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-moe, every second layer": ("qwen3-moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}),
    "qwen3-moe, unscaled weights, window": (
        "qwen3-moe",
        {"norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 30, "num_experts_per_tok": 3},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_64_tokens_and_their_logits_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    architecture, overrides = VARIANTS[variant]
    directory = write_tiny_model(tmp_path / "model", architecture, **overrides)
    sequences = (DrivenSequence(p, greedy(64), chunk_tokens=33, start_step=i) for i, p in enumerate(PROMPTS))
    assert_logits_match(directory, load_reference(directory), *sequences)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_a_mixture_of_experts_has_the_same_bits_alone_and_in_a_batch(tmp_path: Path, dtype: str) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen3-moe")
    single = alone(directory, PROMPTS, dtype=dtype)
    sequences = (DrivenSequence(p, greedy(), chunk_tokens=19, start_step=i) for i, p in enumerate(PROMPTS))
    assert_same_bits(driver(directory, dtype=dtype).run(*sequences), single)


def test_a_checkpoint_in_shards_is_the_checkpoint_in_one_file(tmp_path: Path) -> None:
    whole = write_tiny_model(tmp_path / "whole", "qwen3-moe")
    sharded = write_tiny_model(tmp_path / "sharded", "qwen3-moe")
    (sharded / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert_same_bits(alone(sharded, PROMPTS), alone(whole, PROMPTS))


def test_a_checkpoint_in_bfloat16_is_read_as_it_is(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen2")
    AutoModelForCausalLM.from_pretrained(directory).to(torch.bfloat16).save_pretrained(directory)
    reference = load_reference(directory)
    for sequence in driver(directory).run(*(DrivenSequence(p, greedy()) for p in PROMPTS)):
        assert_matches(reference, sequence, 1e-4)


def test_long_rope_is_served_up_to_where_its_factors_change(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "llama", rope_parameters=LONGROPE)
    assert load_runner(str(directory)).model.max_context_tokens == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "through 9 of 5 experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"rope_parameters": LONGROPE | {"short_factor": [1.0]}}, r"short_factor = \[1\.0\]; a list of 8 numbers"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": None}, "partial_rotary_factor"),
        ({"layer_types": ["sliding_attention"], "architectures": ["Qwen3ForCausalLM"]}, "1 layer_types for 3 layers"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen3-moe")
    raw = json.loads((directory / "config.json").read_text()) | changes
    with pytest.raises(ModelError, match=message):
        read_config(raw)
