"""Attention as a seam inside the forward pass.

Owns: what a backend is given and must do.
Does not know: any backend (`attention/choose.py` finds them by name).
Next on the path: `attention/torch_attention.py`, the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from busllm.engine.batch import RaggedBatch
from busllm.engine.kv_cache import KVCache, KVShape


class AttentionConfig(msgspec.Struct, frozen=True):
    """What a backend is made for.

    Attributes:
        num_heads: query heads; a multiple of the KV heads, consecutive ones share one.
        scale: multiplies the scores.
        layer_windows: per layer, how many positions (its own included) a token sees; None = all.
        kv: sizes, dtype and device of the KV cache.
        soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap) before the mask; None = they stay.
        layer_sinks: per layer, float32 (num_heads,) on the device: a score that takes part in the softmax and carries
            no value; None = no layer has them.

    A backend that cannot do one of the last two refuses it with a `ModelError` when it is made.
    """

    num_heads: int
    scale: float
    layer_windows: tuple[int | None, ...]
    kv: KVShape
    soft_cap: float | None = None
    layer_sinks: tuple[torch.Tensor, ...] | None = None


class Attention(Protocol):
    """Causal attention of ragged rows over paged keys and values. It owns the KV cache, so the layout is its choice.

    Guarantees:
        - a token sees the positions of its own row up to its own, and of these the last `window`;
        - what lies beyond a row's length in its last page, or in any other page, has no influence.
    """

    @property
    def cache(self) -> KVCache:
        """Where the decoder stores a step's keys and values before it attends."""
        ...

    def prepare(self, batch: RaggedBatch) -> None:
        """Takes a step's rows. Called once before the layers of the step."""
        ...

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attends in one layer; this step's keys and values are already in the cache.

        Args:
            layer: which.
            queries: (num_tokens, num_heads, head_dim), rows one after the other as in the batch.

        Returns:
            Same shape and dtype.
        """
        ...


AttentionFactory = Callable[[AttentionConfig], Attention]
