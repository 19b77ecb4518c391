"""`config.json` from GGUF metadata."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from busllm.errors import ModelError
from busllm.model_store.gguf_config import generation_config, model_config
from busllm.model_store.gguf_file import GgufFile


def test_every_number_of_a_llama_is_found(write_gguf):
    config = model_config(GgufFile(write_gguf()))
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 19,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }


def test_a_file_with_an_output_matrix_is_not_tied(write_gguf, hf_weights):
    path = write_gguf(tensors=hf_weights | {"output.weight": hf_weights["token_embd.weight"]})
    assert model_config(GgufFile(path))["tie_word_embeddings"] is False


def _llama3_factors(scaling: dict[str, object]) -> np.ndarray:
    """The factors as a converter computes them: plain frequencies over scaled ones, by `transformers`."""
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": 10000.0},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / (10000.0 ** (torch.arange(0, 16, 2) / 16))
    return (plain / scaled).numpy().astype(np.float32)


def test_llama_3_rope_scaling_is_recovered_from_its_factors(write_gguf, hf_weights):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    path = write_gguf(tensors=hf_weights | {"rope_freqs.weight": _llama3_factors(scaling)})
    assert model_config(GgufFile(path))["rope_scaling"] == scaling


def test_other_rope_factors_are_refused_and_not_ignored(write_gguf, hf_weights):
    path = write_gguf(tensors=hf_weights | {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)})
    with pytest.raises(ModelError, match="rope factors"):
        model_config(GgufFile(path))


def test_an_architecture_that_is_not_known_is_refused_with_the_known_ones(write_gguf):
    with pytest.raises(ModelError, match=r"'gemma2'.*llama, qwen2"):
        model_config(GgufFile(write_gguf(arch="gemma2")))


def test_every_end_of_turn_token_is_in_the_generation_config(write_gguf):
    path = write_gguf(extra={"add_eot_token_id": 5})
    assert generation_config(GgufFile(path))["eos_token_id"] == [0, 5]
