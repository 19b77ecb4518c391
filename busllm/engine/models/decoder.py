"""The one decoder: a stack of pre-norm layers with rotary attention and a gated feed-forward, configured per model.

Owns: the order of the operations of a forward pass.
Does not know: files, weight formats (`models/build.py` makes the layers), how attention works (`engine/attention/`),
sequences, sampling.
Next on the path: `engine/sampler.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from busllm.engine.attention.protocol import Attention
from busllm.engine.layers.feed_forward import FeedForward
from busllm.engine.layers.linear import Linear
from busllm.engine.layers.rms_norm import RmsNorm
from busllm.engine.layers.rope import Rope, rotate
from busllm.engine.models.config import ModelConfig
from busllm.engine.row_scans import RowScans, TorchScans


@dataclass(frozen=True)
class AttentionWeights:
    """Layers around one layer's attention; `query_norm` and `key_norm` only where the model has them."""

    queries_keys_values: Linear
    output: Linear
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None


@dataclass(frozen=True)
class DecoderLayer:
    """One layer."""

    attention_norm: RmsNorm
    attention: AttentionWeights
    feed_forward_norm: RmsNorm
    feed_forward: FeedForward


class Decoder:
    """Token ids in, hidden states and logits out."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Callable[[torch.Tensor], torch.Tensor],
        rope: Rope,
        layers: tuple[DecoderLayer, ...],
        norm: RmsNorm,
        head: Linear,
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._rope = rope
        self._layers = layers
        self._norm = norm
        self._head = head

    @property
    def is_recordable(self) -> bool:
        """No layer chooses experts: which of them have work is known on the host alone."""
        return self.config.experts is None

    @property
    def row_scans(self) -> RowScans:
        """By torch."""
        return TorchScans()

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache_slots: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        """Runs all layers over a step's tokens.

        Args:
            token_ids: int64 (num_tokens,).
            positions: int64 (num_tokens,).
            cache_slots: int64 (num_tokens,), where each token's key and value are stored.
            attention: prepared with the same step.

        Returns:
            (num_tokens, hidden_size), before the last norm.
        """
        states = self._embedding(token_ids)
        angles = self._rope.angles(positions)
        for index, layer in enumerate(self._layers):
            states = states + self._attend(index, layer, states, angles, cache_slots, attention)
            states = states + layer.feed_forward(layer.feed_forward_norm(states))
        return states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) → float32 (num_rows, vocab_size)."""
        return self._head(self._norm(states)).float()

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        states: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache_slots: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        config, weights = self.config, layer.attention
        num_tokens = states.shape[0]
        merged = weights.queries_keys_values(layer.attention_norm(states))
        heads = merged.view(num_tokens, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        rotated, values = torch.split(heads, [config.num_heads + config.num_kv_heads, config.num_kv_heads], dim=1)
        if weights.query_norm is not None and weights.key_norm is not None:
            queries, keys = torch.split(rotated, [config.num_heads, config.num_kv_heads], dim=1)
            rotated = torch.cat((weights.query_norm(queries), weights.key_norm(keys)), dim=1)
        rotated = rotate(rotated, *angles)
        queries, keys = torch.split(rotated, [config.num_heads, config.num_kv_heads], dim=1)
        attention.cache.store(index, keys, values, cache_slots)
        attended = attention.attend(index, queries)  # (num_tokens, num_heads, head_dim)
        return weights.output(attended.view(num_tokens, config.num_heads * config.head_dim))
