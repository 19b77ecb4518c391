"""Layers that need the other ranks.

Owns: the sum after a layer whose inner width is split, the embedding and the head whose vocabulary is split.
Does not know: how tensors travel. A linear whose outputs are split needs nothing: it is a smaller linear.
Next on the path: `engine/models/build.py`, which puts them where a plain layer would be.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from busllm.engine.layers.feed_forward import FeedForward
from busllm.engine.layers.linear import Linear, make_linear
from busllm.engine.parallel.group import Group
from busllm.engine.parallel.shard import Shard, size_of


class Summed:
    """A linear of which each rank has some inputs, or a feed-forward layer of which it has some of the inner width.

    What the ranks get out are summands.
    """

    def __init__(self, layer: Linear | FeedForward, group: Group) -> None:
        self._layer = layer
        self._group = group

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(num_rows, the layer's input size) → (num_rows, hidden_size), the same at every rank."""
        return self._group.sum(self._layer(states))


class ShardedEmbedding:
    """An embedding of which each rank has some rows: a token's row comes from the rank that has it.

    Args:
        weight: this rank's rows.
        first_id: the token id of the first of them.
    """

    def __init__(self, weight: torch.Tensor, first_id: int, group: Group) -> None:
        self._weight = weight
        self._first_id = first_id
        self._group = group

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) of ids → (num_tokens, hidden_size)."""
        own = token_ids - self._first_id
        is_elsewhere = (own < 0) | (own >= self._weight.shape[0])
        rows = functional.embedding(own.masked_fill(is_elsewhere, 0), self._weight)
        return self._group.sum(rows.masked_fill(is_elsewhere[:, None], 0))


class ShardedHead:
    """A head of which each rank has some rows of the vocabulary; the first rank gets the logits.

    Args:
        linear: of this rank's rows, padded to the size of the largest part.
        vocab_size: of the whole head.
    """

    def __init__(self, linear: Linear, vocab_size: int, group: Group) -> None:
        self._linear = linear
        self._vocab_size = vocab_size
        self._group = group

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) → (num_rows, vocab_size) at the first rank, (0, vocab_size) at the others."""
        parts = self._group.gather(self._linear(states))
        if parts is None:
            return states.new_empty((0, self._vocab_size))
        sizes = [size_of(Shard(rank, len(parts)).span(self._vocab_size)) for rank in range(len(parts))]
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)


def sharded_head(weight: torch.Tensor, vocab_size: int, group: Group) -> ShardedHead:
    """A head of this rank's rows, which are filled up with zeros: what is gathered must have one shape."""
    missing = group.shard.widest(vocab_size) - weight.shape[0]
    return ShardedHead(make_linear(functional.pad(weight, (0, 0, 0, missing))), vocab_size, group)
