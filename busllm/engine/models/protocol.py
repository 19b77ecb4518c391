"""A causal language model as the runner sees it.

Owns: what a model is asked for, whoever wrote its layers.
Does not know: sequences, sampling, weights.
Next on the path: `models/decoder.py` (our own decoder) or `models/hooked/` (any other, inside `transformers`).
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch

from busllm.engine.attention.protocol import Attention, AttentionConfig
from busllm.engine.kv_cache import KVShape
from busllm.engine.row_scans import RowScans


class AttentionShape(msgspec.Struct, frozen=True):
    """What a model's layers need of attention and of the KV cache, the same for each layer where nothing else is said.

    Attributes:
        num_layers: layers with keys and values.
        num_heads, num_kv_heads, head_dim: num_heads is a multiple of num_kv_heads.
        scale: multiplies the scores.
        layer_windows: per layer, how many positions (its own included) a token sees; None = all.
        soft_cap: of the scores (see `AttentionConfig`); None = none.
        layer_sinks: per layer, float32 (num_heads,) (see `AttentionConfig`); None = none.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    layer_windows: tuple[int | None, ...]
    soft_cap: float | None = None
    layer_sinks: tuple[torch.Tensor, ...] | None = None


def attention_config(shape: AttentionShape, kv: KVShape) -> AttentionConfig:
    """What an attention backend of this model is made with."""
    return AttentionConfig(
        num_heads=shape.num_heads,
        scale=shape.scale,
        layer_windows=shape.layer_windows,
        kv=kv,
        soft_cap=shape.soft_cap,
        layer_sinks=shape.layer_sinks,
    )


class CausalModelConfig(Protocol):
    """What the runner must know before the first step."""

    @property
    def architecture(self) -> str:
        """As `config.json` names it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        ...

    @property
    def attention_shape(self) -> AttentionShape:
        """For the attention backend and its KV cache."""
        ...


class CausalModel(Protocol):
    """Token ids in, hidden states and logits out."""

    @property
    def config(self) -> CausalModelConfig:
        """Its sizes."""
        ...

    @property
    def is_recordable(self) -> bool:
        """Whether `hidden_states` reads nothing back from the device, so that a step may be recorded and replayed."""
        ...

    @property
    def row_scans(self) -> RowScans:
        """What looks through whole rows of its logits, with the cores that a step of it uses."""
        ...

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache_slots: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        """Runs all layers over a step's tokens, which are the rows of several sequences one after the other.

        Args:
            token_ids: int64 (num_tokens,).
            positions: int64 (num_tokens,), each within its own sequence.
            cache_slots: int64 (num_tokens,), where each token's key and value are stored.
            attention: prepared with the same step.

        Returns:
            (num_tokens, hidden_size), for `logits`.
        """
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Some rows of `hidden_states` (num_rows, hidden_size) → float32 (num_rows, vocab_size)."""
        ...
