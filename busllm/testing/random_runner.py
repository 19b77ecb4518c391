"""A runner of a model with random weights, made on the device, without files.

Owns: shapes of published models, and a weight reader that draws what it is asked for.
Does not know: what is tested or measured with it.

Unlike `testing/tiny_model.py` nothing is written to disk, so a model of published size is there in a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from busllm.engine.attention.protocol import AttentionFactory
from busllm.engine.graphs import GraphRecorder
from busllm.engine.model_runner import ModelRunner
from busllm.engine.models.build import WeightReader, build_decoder
from busllm.engine.models.config import read_config
from busllm.engine.runner import ModelInfo
from busllm.model_store.tensor_part import WHOLE, TensorPart

_SMALL: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}

SMALL_LLAMA: Mapping[str, Any] = {"architectures": ["LlamaForCausalLM"], "head_dim": 64, **_SMALL}
SMALL_QWEN3: Mapping[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, **_SMALL}
SMALL_MISTRAL: Mapping[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "head_dim": 64,
    "sliding_window": 24,
    **_SMALL,
}
QWEN3_0_6B: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}


class RandomWeights:
    """Implements `WeightReader`: normal numbers; norms around 1.

    Args:
        device, dtype: of the tensors.
        std: standard deviation. At the usual 0.02 a small model hardly looks at its context.
        seed: same seed and device, same weights.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, std: float = 0.15, seed: int = 0) -> None:
        self._dtype = dtype
        self._std = std
        self._generator = torch.Generator(device).manual_seed(seed)

    @property
    def device(self) -> torch.device:
        """Where tensors are put."""
        return self._generator.device

    def has(self, name: str) -> bool:
        """Whether a tensor is there, for those that a model may go without: none of these is."""
        return False

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart = WHOLE) -> torch.Tensor:
        """Draws a tensor."""
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        drawn = torch.randn(part.shape_of(shape), generator=self._generator, device=self.device)
        return drawn.mul_(self._std).add_(mean).to(self._dtype)


def random_runner(
    raw: Mapping[str, Any],
    attention: AttentionFactory,
    *,
    device: torch.device,
    dtype: torch.dtype,
    recorder: GraphRecorder | None = None,
    weights: WeightReader | None = None,
) -> ModelRunner:
    """Builds a model and its runner.

    Args:
        raw: what a `config.json` would hold.
        attention: makes the backend.
        device, dtype: of weights and cache.
        recorder: of decode steps.
        weights: None = `RandomWeights`.
    """
    config = read_config(raw)
    decoder = build_decoder(config, weights or RandomWeights(device, dtype))
    shape = config.attention_shape
    model = ModelInfo(
        name=config.architecture,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_context_tokens,
        eos_token_ids=(),
        kv_bytes_per_token=2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize,
        fingerprint="random",
    )
    return ModelRunner(decoder, model, device=device, dtype=dtype, attention=attention, recorder=recorder)
