"""Which forward pass serves a model, and what is said when it cannot be the one that was asked for."""

from __future__ import annotations

import msgspec
import pytest

from busllm.engine.cpu.instructions import detect_instructions
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
def test_a_cpu_computes_by_the_compiled_pass(attention: str, quantization: str) -> None:
    wish = msgspec.structs.replace(PLAIN, attention=attention, quantization=quantization)
    assert choose_forward(wish, model()) is ForwardPass.COMPILED


HINDRANCES = [
    ({"device": "cuda"}, model, "device"),
    ({"dtype": "float32"}, model, "dtype"),
    ({"num_ranks": 2}, model, "2 ranks"),
    ({}, lambda: None, "architecture"),
    ({}, with_experts, "experts"),
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
