"""Which forward pass serves a model, and what is said when it cannot be the one that was asked for."""

from __future__ import annotations

import msgspec
import pytest

from busllm.engine.config import COMPILED_PAGE_UNIT
from busllm.engine.cpu.instructions import detect_instructions
from busllm.engine.cpu.runs import BLOCK
from busllm.engine.forward_choice import ForwardPass, ForwardWish, choose_forward
from busllm.engine.models.config import ExpertsConfig, ModelConfig, read_config
from busllm.errors import ConfigError, ModelError

PLAIN = ForwardWish(attention="auto", quantization="auto", dtype="auto", device="cpu", num_ranks=1)
needs_kernels = pytest.mark.skipif(detect_instructions() is None, reason="this CPU lacks the instructions")


def model() -> ModelConfig:
    return read_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 32,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
        }
    )


def with_experts() -> ModelConfig:
    experts = ExpertsConfig(frozenset({0}), 4, 2, 32, True)
    return msgspec.structs.replace(model(), experts=experts)


@needs_kernels
@pytest.mark.parametrize("attention", ["auto", "cpu"])
@pytest.mark.parametrize("quantization", ["auto", "none", "int8", "int4"])
@pytest.mark.parametrize("shape", [model, with_experts])
def test_a_cpu_computes_by_the_compiled_pass(shape, attention: str, quantization: str) -> None:  # type: ignore[no-untyped-def]
    wish = msgspec.structs.replace(PLAIN, attention=attention, quantization=quantization)
    assert choose_forward(wish, shape()) is ForwardPass.COMPILED


@needs_kernels
@pytest.mark.parametrize("weights", ["bfloat16", "q4_0", "q4_1", "q8_0", "q4_k", "q6_k"])
def test_what_is_stored_in_few_bits_is_computed_by_the_compiled_pass(weights: str) -> None:
    assert choose_forward(msgspec.structs.replace(PLAIN, weights=weights), model()) is ForwardPass.COMPILED


@needs_kernels
@pytest.mark.parametrize("weights", ["float32", "float16"])
def test_weights_are_rounded_to_bfloat16_only_when_that_is_asked_for(weights: str) -> None:
    stored = msgspec.structs.replace(PLAIN, weights=weights)
    assert choose_forward(stored, model()) is ForwardPass.TORCH
    for changes in ({"attention": "cpu"}, {"quantization": "none"}, {"quantization": "int8"}):
        assert choose_forward(msgspec.structs.replace(stored, **changes), model()) is ForwardPass.COMPILED  # type: ignore[arg-type]


@needs_kernels
def test_pages_that_cut_the_blocks_of_the_compiled_pass_are_served_by_torch_or_refused() -> None:
    assert COMPILED_PAGE_UNIT == BLOCK
    wish = msgspec.structs.replace(PLAIN, page_tokens=24)
    assert choose_forward(wish, model()) is ForwardPass.TORCH
    assert choose_forward(msgspec.structs.replace(wish, page_tokens=48), model()) is ForwardPass.COMPILED
    with pytest.raises(ConfigError, match=r"scheduler\.page_tokens: is 24; .* a multiple of 16"):
        choose_forward(msgspec.structs.replace(wish, attention="cpu"), model())
    with pytest.raises(ConfigError, match="page_tokens is 24"):
        choose_forward(msgspec.structs.replace(wish, quantization="int8"), model())


HINDRANCES = [
    ({"device": "cuda"}, model, "device"),
    ({"dtype": "float32"}, model, "dtype"),
    ({"num_ranks": 2}, model, "2 ranks"),
    ({}, lambda: None, "architecture"),
]


@pytest.mark.parametrize(("changes", "shape", "reason"), HINDRANCES)
def test_torch_serves_what_the_compiled_pass_cannot(changes: dict[str, object], shape, reason: str) -> None:  # type: ignore[no-untyped-def]
    wish = msgspec.structs.replace(PLAIN, **changes)
    assert choose_forward(wish, shape()) is ForwardPass.TORCH
    with pytest.raises(ModelError, match=reason):
        choose_forward(msgspec.structs.replace(wish, attention="cpu"), shape())
    with pytest.raises(ConfigError, match=reason):
        choose_forward(msgspec.structs.replace(wish, quantization="int4"), shape())


def test_a_backend_that_is_named_is_taken() -> None:
    assert choose_forward(msgspec.structs.replace(PLAIN, attention="torch"), model()) is ForwardPass.TORCH
    with pytest.raises(ConfigError, match="'torch'"):
        choose_forward(msgspec.structs.replace(PLAIN, attention="torch", quantization="int8"), model())
