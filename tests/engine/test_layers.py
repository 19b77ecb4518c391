"""Layers: rotary frequencies as published, and rows that do not depend on their neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from busllm.engine.layers.feed_forward import GatedFeedForward
from busllm.engine.layers.linear import OneDnnLinear, PlainLinear, make_linear
from busllm.engine.layers.rope import attention_factor as ours_attention_factor
from busllm.engine.layers.rope import frequencies, rotate
from busllm.engine.models.rope_config import read_rope
from busllm.errors import ModelError

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 20, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.5},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "dynamic", "factor": 4.0},
    {
        "rope_type": "longrope",
        "short_factor": [1.0 + index / 50 for index in range(64)],
        "long_factor": [2.0 + index for index in range(64)],
        "original_max_position_embeddings": 1024,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("newer_spelling", [True, False])
def test_scaled_frequencies_are_those_of_transformers(scaling: dict[str, Any], newer_spelling: bool) -> None:
    theta = 500000.0
    theirs = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    raw = {"rope_parameters": {"rope_theta": theta, **scaling}}
    if not newer_spelling:
        raw = {"rope_theta": theta, "rope_scaling": scaling}  # type: ignore[dict-item]
    ours = read_rope(raw, 128, 4096)
    torch.testing.assert_close(frequencies(ours), expected, rtol=1e-6, atol=0)
    assert ours_attention_factor(ours) == pytest.approx(attention_factor)


@pytest.mark.parametrize("raw", [{"rope_scaling": {"type": "axial", "factor": 2.0}}, {"partial_rotary_factor": 0.5}])
def test_rope_that_is_not_done_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        read_rope(raw, 64, 2048)


def test_a_rotation_keeps_lengths_and_depends_on_the_distance_only() -> None:
    angles = torch.arange(50)[:, None] * frequencies(read_rope({}, 16, 64))
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
    query, key = torch.randn(1, 1, 16).expand(50, -1, -1), torch.randn(1, 1, 16).expand(50, -1, -1)
    queries, keys = rotate(query, cosines, sines), rotate(key, cosines, sines)
    torch.testing.assert_close(queries.norm(dim=-1), query.norm(dim=-1))
    scores = torch.einsum("qhd,khd->qk", queries, keys)
    torch.testing.assert_close(scores[30:, 30:], scores[:20, :20], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_in", "num_out"), [(48, 96), (576, 960), (33, 17)])
def test_a_row_of_a_linear_has_the_same_bits_in_any_batch(dtype: torch.dtype, num_in: int, num_out: int) -> None:
    linear = make_linear(torch.randn(num_out, num_in).to(dtype), torch.randn(num_out).to(dtype))
    if isinstance(linear, PlainLinear):
        pytest.skip(f"this CPU cannot pack {dtype}")
    states = torch.randn(256, num_in).to(dtype)
    with torch.inference_mode():
        whole = linear(states)
        for size in (1, 2, 3, 5, 8, 9, 17, 31, 64, 100):
            assert torch.equal(linear(states[7 : 7 + size]), whole[7 : 7 + size])


def test_both_linears_compute_the_same() -> None:
    weight, bias, states = torch.randn(30, 20), torch.randn(30), torch.randn(5, 20)
    with torch.inference_mode():
        torch.testing.assert_close(OneDnnLinear(weight, bias)(states), PlainLinear(weight, bias)(states))


@pytest.mark.parametrize("num_threads", [1, 3, 5])
def test_a_row_of_the_feed_forward_layer_has_the_same_bits_in_any_batch(num_threads: int) -> None:
    gate, up, down = (make_linear(torch.randn(n, k) * 0.1) for n, k in ((1536, 64), (1536, 64), (64, 1536)))
    layer = GatedFeedForward(gate, up, down)
    states = torch.randn(200, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            whole = layer(states)
            for size in (1, 11, 40, 63, 101):
                assert torch.equal(layer(states[13 : 13 + size]), whole[13 : 13 + size])
    finally:
        torch.set_num_threads(before)
