"""Builds a decoder from named weights.

Owns: the names and shapes that a checkpoint must have, and which tensors are joined into one linear.
Does not know: files and formats (a `WeightReader` hands tensors out), the order of operations.
Next on the path: `engine/models/decoder.py`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from busllm.engine.layers.embedding import Embedding
from busllm.engine.layers.experts import MixtureOfExperts
from busllm.engine.layers.feed_forward import FeedForward, GatedFeedForward
from busllm.engine.layers.linear import Linear, make_linear
from busllm.engine.layers.rms_norm import RmsNorm
from busllm.engine.layers.rope import Rope
from busllm.engine.models.config import ModelConfig
from busllm.engine.models.decoder import AttentionWeights, Decoder, DecoderLayer


class WeightReader(Protocol):
    """Hands out a checkpoint's tensors, on the right device and in the right dtype."""

    @property
    def device(self) -> torch.device:
        """Where tensors are put."""
        ...

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Reads one tensor.

        Raises:
            ModelError: it is missing or has another shape.
        """
        ...


def build_decoder(config: ModelConfig, weights: WeightReader) -> Decoder:
    """Builds the whole model.

    Raises:
        ModelError: a tensor is missing or has another shape than the configuration says.
    """
    table = (config.vocab_size, config.hidden_size)
    embedding = weights.take("model.embed_tokens.weight", table)
    layers = tuple(_layer(config, weights, index) for index in range(config.num_layers))
    head = embedding if config.tie_word_embeddings else weights.take("lm_head.weight", table)
    return Decoder(
        config,
        embedding=Embedding(embedding),
        rope=Rope(config.rope, weights.device),
        layers=layers,
        norm=_norm(weights, "model.norm", config.hidden_size, config),
        head=make_linear(head),
    )


def _layer(config: ModelConfig, weights: WeightReader, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}."
    has_experts = config.experts is not None and index in config.experts.layers
    feed_forward = _experts if has_experts else _dense
    return DecoderLayer(
        attention_norm=_norm(weights, prefix + "input_layernorm", config.hidden_size, config),
        attention=_attention(config, weights, prefix + "self_attn."),
        feed_forward_norm=_norm(weights, prefix + "post_attention_layernorm", config.hidden_size, config),
        feed_forward=feed_forward(config, weights, prefix + "mlp."),
    )


def _attention(config: ModelConfig, weights: WeightReader, prefix: str) -> AttentionWeights:
    query_size, kv_size = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
    merged = torch.cat([weights.take(f"{prefix}{name}.weight", (n, config.hidden_size)) for name, n in parts.items()])
    bias = None
    if config.qkv_bias:
        bias = torch.cat([weights.take(f"{prefix}{name}.bias", (n,)) for name, n in parts.items()])
    return AttentionWeights(
        queries_keys_values=make_linear(merged, bias),
        output=_linear(
            weights,
            prefix + "o_proj",
            (config.hidden_size, query_size),
            config.output_bias,
        ),
        query_norm=_norm(weights, prefix + "q_norm", config.head_dim, config) if config.qk_norm else None,
        key_norm=_norm(weights, prefix + "k_norm", config.head_dim, config) if config.qk_norm else None,
    )


def _dense(config: ModelConfig, weights: WeightReader, prefix: str) -> FeedForward:
    return _gated(config, weights, prefix, config.intermediate_size)


def _experts(config: ModelConfig, weights: WeightReader, prefix: str) -> FeedForward:
    experts = config.experts
    assert experts is not None  # only layers that have experts come here
    return MixtureOfExperts(
        router=_linear(weights, prefix + "gate", (experts.num_experts, config.hidden_size), has_bias=False),
        experts=tuple(
            _gated(config, weights, f"{prefix}experts.{index}.", experts.intermediate_size)
            for index in range(experts.num_experts)
        ),
        experts_per_token=experts.experts_per_token,
        normalizes=experts.normalizes,
    )


def _gated(config: ModelConfig, weights: WeightReader, prefix: str, size: int) -> GatedFeedForward:
    return GatedFeedForward(
        gate=_linear(weights, prefix + "gate_proj", (size, config.hidden_size), config.mlp_bias),
        up=_linear(weights, prefix + "up_proj", (size, config.hidden_size), config.mlp_bias),
        down=_linear(weights, prefix + "down_proj", (config.hidden_size, size), config.mlp_bias),
    )


def _linear(weights: WeightReader, name: str, shape: tuple[int, int], has_bias: bool) -> Linear:
    bias = weights.take(f"{name}.bias", (shape[0],)) if has_bias else None
    return make_linear(weights.take(f"{name}.weight", shape), bias)


def _norm(weights: WeightReader, name: str, size: int, config: ModelConfig) -> RmsNorm:
    return RmsNorm(weights.take(f"{name}.weight", (size,)), config.rms_norm_eps)
