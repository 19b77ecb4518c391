"""Builds a decoder from named weights.

Owns: the names and shapes that a checkpoint must have, which tensors are joined into one linear, and which part of each
a rank reads.
Does not know: files and formats (a `WeightReader` hands tensors out), the order of operations.
Next on the path: `engine/models/decoder.py`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from msgspec import structs

from busllm.engine.layers.embedding import Embedding
from busllm.engine.layers.experts import MixtureOfExperts
from busllm.engine.layers.feed_forward import FeedForward, GatedFeedForward
from busllm.engine.layers.linear import Linear, make_linear
from busllm.engine.layers.rms_norm import RmsNorm
from busllm.engine.layers.rope import Rope
from busllm.engine.models.config import ModelConfig
from busllm.engine.models.decoder import AttentionWeights, Decoder, DecoderLayer
from busllm.engine.parallel.group import Alone, Group
from busllm.engine.parallel.layers import ShardedEmbedding, Summed, sharded_head
from busllm.engine.parallel.shard import Shard, rows_of, size_of
from busllm.model_store.tensor_part import WHOLE, TensorPart

_HEAD = "lm_head.weight"


class WeightReader(Protocol):
    """Hands out a checkpoint's tensors, on the right device and in the right dtype."""

    @property
    def device(self) -> torch.device:
        """Where tensors are put."""
        ...

    def has(self, name: str) -> bool:
        """Whether a tensor is there, for those that a model may go without."""
        ...

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart = WHOLE) -> torch.Tensor:
        """Reads one tensor, or a part of it.

        Args:
            shape: of the whole tensor.

        Raises:
            ModelError: it is missing or has another shape.
        """
        ...


def build_decoder(config: ModelConfig, weights: WeightReader, group: Group | None = None) -> Decoder:
    """Builds the whole model, or one rank's part of it.

    Args:
        group: the ranks that the model is split among; None = it is not.

    Raises:
        ModelError: a tensor is missing or has another shape than the configuration says, or the heads cannot be split.
    """
    group = group or Alone()
    own = structs.replace(
        config,
        num_heads=size_of(group.shard.heads(config.num_heads)),
        num_kv_heads=size_of(group.shard.kv_heads(config.num_kv_heads)),
    )
    table = (config.vocab_size, config.hidden_size)
    tokens = group.shard.span(config.vocab_size)
    embedding = weights.take("model.embed_tokens.weight", table, TensorPart(tokens))
    layers = tuple(_layer(config, weights, index, group) for index in range(config.num_layers))
    head = embedding
    # A head that is stored although the embedding is to be it, and differs, is what the model was trained with.
    if not config.tie_word_embeddings or weights.has(_HEAD):
        stored = weights.take(_HEAD, table, TensorPart(tokens))
        head = embedding if config.tie_word_embeddings and torch.equal(stored, embedding) else stored
    is_whole = group.shard.num_ranks == 1
    return Decoder(
        own,
        embedding=Embedding(embedding) if is_whole else ShardedEmbedding(embedding, tokens.start, group),
        rope=Rope(config.rope, weights.device),
        layers=layers,
        norm=_norm(weights, "model.norm", config.hidden_size, config),
        head=make_linear(head) if is_whole else sharded_head(head, config.vocab_size, group),
    )


def _layer(config: ModelConfig, weights: WeightReader, index: int, group: Group) -> DecoderLayer:
    prefix = f"model.layers.{index}."
    has_experts = config.experts is not None and index in config.experts.layers
    feed_forward = (_experts if has_experts else _dense)(config, weights, prefix + "mlp.", group.shard)
    return DecoderLayer(
        attention_norm=_norm(weights, prefix + "input_layernorm", config.hidden_size, config),
        attention=_attention(config, weights, prefix + "self_attn.", group),
        feed_forward_norm=_norm(weights, prefix + "post_attention_layernorm", config.hidden_size, config),
        feed_forward=feed_forward if group.shard.num_ranks == 1 else Summed(feed_forward, group),
    )


def _attention(config: ModelConfig, weights: WeightReader, prefix: str, group: Group) -> AttentionWeights:
    query_size, kv_size = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    queries = rows_of(group.shard.heads(config.num_heads), config.head_dim)
    keys = rows_of(group.shard.kv_heads(config.num_kv_heads), config.head_dim)
    parts = {"q_proj": (query_size, queries), "k_proj": (kv_size, keys), "v_proj": (kv_size, keys)}
    merged = torch.cat(
        [
            weights.take(f"{prefix}{name}.weight", (size, config.hidden_size), TensorPart(rows))
            for name, (size, rows) in parts.items()
        ]
    )
    bias = None
    if config.qkv_bias:
        bias = torch.cat(
            [weights.take(f"{prefix}{name}.bias", (size,), TensorPart(rows)) for name, (size, rows) in parts.items()]
        )
    shape = (config.hidden_size, query_size)
    output = _inwards(weights, prefix + "o_proj", shape, config.output_bias, queries, group.shard)
    return AttentionWeights(
        queries_keys_values=make_linear(merged, bias),
        output=output if group.shard.num_ranks == 1 else Summed(output, group),
        query_norm=_norm(weights, prefix + "q_norm", config.head_dim, config) if config.qk_norm else None,
        key_norm=_norm(weights, prefix + "k_norm", config.head_dim, config) if config.qk_norm else None,
    )


def _dense(config: ModelConfig, weights: WeightReader, prefix: str, shard: Shard) -> FeedForward:
    return _gated(config, weights, prefix, config.intermediate_size, shard)


def _experts(config: ModelConfig, weights: WeightReader, prefix: str, shard: Shard) -> FeedForward:
    experts = config.experts
    assert experts is not None  # only layers that have experts come here
    return MixtureOfExperts(
        router=_outwards(weights, prefix + "gate", (experts.num_experts, config.hidden_size), has_bias=False),
        experts=tuple(
            _gated(config, weights, f"{prefix}experts.{index}.", experts.intermediate_size, shard)
            for index in range(experts.num_experts)
        ),
        experts_per_token=experts.experts_per_token,
        normalizes=experts.normalizes,
    )


def _gated(config: ModelConfig, weights: WeightReader, prefix: str, size: int, shard: Shard) -> GatedFeedForward:
    """The unit, or a rank's part of its inner width; then its output is one summand."""
    own, has_bias = shard.span(size), config.mlp_bias
    return GatedFeedForward(
        gate=_outwards(weights, prefix + "gate_proj", (size, config.hidden_size), has_bias, own),
        up=_outwards(weights, prefix + "up_proj", (size, config.hidden_size), has_bias, own),
        down=_inwards(weights, prefix + "down_proj", (config.hidden_size, size), has_bias, own, shard),
    )


def _outwards(
    weights: WeightReader, name: str, shape: tuple[int, int], has_bias: bool, rows: slice = WHOLE.rows
) -> Linear:
    """A linear of some outputs."""
    bias = weights.take(f"{name}.bias", (shape[0],), TensorPart(rows)) if has_bias else None
    return make_linear(weights.take(f"{name}.weight", shape, TensorPart(rows)), bias)


def _inwards(
    weights: WeightReader, name: str, shape: tuple[int, int], has_bias: bool, columns: slice, shard: Shard
) -> Linear:
    """A linear of some inputs. Of the ranks' summands one has the bias."""
    bias = weights.take(f"{name}.bias", (shape[0],)) if has_bias else None
    part = TensorPart(columns=columns)
    return make_linear(weights.take(f"{name}.weight", shape, part), bias if shard.is_first else None)


def _norm(weights: WeightReader, name: str, size: int, config: ModelConfig) -> RmsNorm:
    return RmsNorm(weights.take(f"{name}.weight", (size,)), config.rms_norm_eps)
