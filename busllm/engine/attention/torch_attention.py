"""Attention in plain torch: the readable reference, on any device.

Owns: the gathering of a row's pages, the mask, the softmax.
Does not know: the model, requests, how pages are chosen.
Next on the path: back to `engine/models/decoder.py`.

The keys of a row are read in fixed blocks of positions, from the row's first position on, with a running maximum and
sum (the online softmax of arXiv:2205.14135). A block that a query cannot see leaves its sums exactly as they were. So
a query adds the same numbers in the same order whether it stands in a prompt chunk or a decode row, alone or beside
longer rows, and its result has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from busllm.engine.attention.protocol import AttentionConfig
from busllm.engine.batch import Int32s, Int64s, RaggedBatch
from busllm.engine.kv_cache import TokenMajorKVCache
from busllm.engine.staging import to_device

BLOCK_TOKENS = (
    128  # keys per block; enough to keep the matrix products busy, few enough to waste little on a last block
)
MIN_QUERY_ROWS = 8  # a product with fewer rows takes another kernel, which adds in another order


@dataclass(frozen=True)
class _Block:
    """A run of positions whose keys are read together, the same for each row of a group.

    Attributes:
        pages: int64 (num_rows, pages_per_block); page 0 stands in where a row has ended.
        ended: bool (num_rows, size, 1, 1), keys beyond the row's length; None = there are none.
        hidden: bool (num_rows * num_kv_heads, num_query_rows, size), scores that do not count; None = all count.
    """

    pages: torch.Tensor
    ended: torch.Tensor | None
    hidden: torch.Tensor | None


@dataclass(frozen=True)
class _Group:
    """Rows with equally many queries: all decode rows, or one prompt chunk.

    Attributes:
        tokens: where the group's tokens lie in the step.
        num_rows: rows.
        num_queries: tokens of each row.
        blocks: per window of the model, the blocks of which some query sees something, in order of position.
    """

    tokens: slice
    num_rows: int
    num_queries: int
    blocks: Mapping[int | None, tuple[_Block, ...]]


class TorchAttention:
    """Implements `Attention` with gathers and batched matrix products; scores and sums are float32."""

    def __init__(self, config: AttentionConfig) -> None:
        self._config = config
        self._cache = TokenMajorKVCache(config.kv)
        self._num_shared = config.num_heads // config.kv.num_kv_heads  # query heads per KV head
        self._pages_per_block = -(-BLOCK_TOKENS // config.kv.page_tokens)
        self._groups: tuple[_Group, ...] = ()

    @property
    def cache(self) -> TokenMajorKVCache:
        """Where the decoder stores a step's keys and values before it attends."""
        return self._cache

    def prepare(self, batch: RaggedBatch) -> None:
        """Takes a step's rows: decode rows form one group, each prompt chunk its own."""
        groups = [(row, row + 1) for row in range(batch.num_decode_rows, batch.num_rows)]
        if batch.num_decode_rows:
            groups.insert(0, (0, batch.num_decode_rows))
        self._groups = tuple(self._make_group(batch, first, end) for first, end in groups)

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attends in one layer: (num_tokens, num_heads, head_dim), same shape back."""
        out = torch.empty_like(queries)
        for group in self._groups:
            out[group.tokens] = self._attend_group(layer, group, queries[group.tokens])
        return out

    def _make_group(self, batch: RaggedBatch, first: int, end: int) -> _Group:
        tokens = slice(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[end]))
        positions = batch.positions[tokens].reshape(end - first, -1)
        lengths = batch.kv_lengths[first:end]
        num_blocks = -(-int(lengths.max()) // (batch.page_tokens * self._pages_per_block))
        pages = np.zeros((end - first, num_blocks * self._pages_per_block), dtype=np.int64)
        for row in range(first, end):
            own = batch.indices[batch.indptr[row] : batch.indptr[row + 1]]
            pages[row - first, : len(own)] = own
        by_block = pages.reshape(end - first, num_blocks, self._pages_per_block)
        blocks = {
            window: tuple(
                block
                for index in range(num_blocks)
                if (block := self._make_block(index, by_block[:, index], positions, lengths, window)) is not None
            )
            for window in set(self._config.layer_windows)
        }
        return _Group(tokens, end - first, positions.shape[1], blocks)

    def _make_block(
        self,
        index: int,
        pages: Int64s,
        positions: Int64s,
        lengths: Int32s,
        window: int | None,
    ) -> _Block | None:
        size = self._pages_per_block * self._config.kv.page_tokens
        keys = index * size + np.arange(size)
        seen = keys <= positions[:, :, None]  # (num_rows, num_queries, size)
        if window is not None:
            seen &= keys > positions[:, :, None] - window
        if not seen.any():
            return None
        ended = keys >= lengths[:, None]  # (num_rows, size)
        return _Block(
            pages=self._to_device(pages),
            ended=self._to_device(ended[:, :, None, None]) if ended.any() else None,
            hidden=None if seen.all() else self._spread_over_heads(self._to_device(~seen)),
        )

    def _spread_over_heads(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, queries, size) → (rows * kv_heads, query rows, size), padded like the queries."""
        per_query_row = _pad_rows(hidden.repeat_interleave(self._num_shared, dim=1))
        return per_query_row.repeat_interleave(self._config.kv.num_kv_heads, dim=0)

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return to_device(array, self._config.kv.device)

    def _attend_group(self, layer: int, group: _Group, queries: torch.Tensor) -> torch.Tensor:
        kv, shared = self._config.kv, self._num_shared
        by_query = (
            group.num_rows,
            group.num_queries,
            kv.num_kv_heads,
            shared,
            kv.head_dim,
        )
        by_head = queries.float().reshape(by_query).transpose(1, 2)  # (rows, kv_heads, queries, shared, head_dim)
        flat = by_head.reshape(group.num_rows * kv.num_kv_heads, group.num_queries * shared, kv.head_dim)
        sums = _RunningSoftmax(_pad_rows(flat * self._config.scale), self._config.soft_cap, self._sinks(layer, group))
        for block in group.blocks[self._config.layer_windows[layer]]:
            keys, values = self._cache.gather(layer, block.pages)  # (rows, size, kv_heads, head_dim)
            if block.ended is not None:
                values = values.masked_fill(block.ended, 0)  # a weight of 0 does not silence a NaN
            sums.add(_by_head(keys), _by_head(values), block.hidden)
        out = sums.result()[:, : group.num_queries * shared].reshape(by_head.shape)
        return out.transpose(1, 2).reshape(queries.shape).to(queries.dtype)

    def _sinks(self, layer: int, group: _Group) -> torch.Tensor | None:
        """Each query row's sink: float32 (rows * kv_heads, query rows, 1), padded like the queries."""
        if self._config.layer_sinks is None:
            return None
        by_kv_head = self._config.layer_sinks[layer].view(self._config.kv.num_kv_heads, 1, self._num_shared)
        per_query_row = by_kv_head.expand(-1, group.num_queries, -1).reshape(self._config.kv.num_kv_heads, -1, 1)
        return _pad_rows(per_query_row).repeat(group.num_rows, 1, 1)


class _RunningSoftmax:
    """softmax(queries · keysᵀ) · values, block by block."""

    def __init__(self, queries: torch.Tensor, soft_cap: float | None, sinks: torch.Tensor | None) -> None:
        """Takes float32: scaled queries (num_groups, num_query_rows, head_dim), sinks (…, 1)."""
        self._queries = queries
        self._soft_cap = soft_cap
        self._sums: _Sums | None = None
        if sinks is not None:  # as if a block came first with one key, of that score, whose value is 0
            self._sums = _Sums(sinks, torch.ones_like(sinks), torch.zeros_like(queries))

    def add(self, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """Adds a block: keys and values (num_groups, size, head_dim), hidden (num_groups, num_query_rows, size)."""
        scores = torch.bmm(self._queries, keys.transpose(1, 2))  # (num_groups, num_query_rows, size)
        if self._soft_cap is not None:
            scores.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        # Finite even when the whole block is hidden from a query: -inf minus -inf would be NaN.
        largest = scores.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
        if self._sums is not None:
            largest = torch.maximum(self._sums.largest, largest)
        weights = scores.sub_(largest).exp_()
        total, weighted = weights.sum(dim=-1, keepdim=True), torch.bmm(weights, values)
        if self._sums is not None:
            shrink = self._sums.largest.sub_(largest).exp_()  # exactly 1 when the block is hidden
            total += self._sums.total.mul_(shrink)
            weighted += self._sums.weighted.mul_(shrink)
        self._sums = _Sums(largest, total, weighted)

    def result(self) -> torch.Tensor:
        """(num_groups, num_query_rows, head_dim), once a block was added."""
        assert self._sums is not None  # a query sees at least its own key
        return self._sums.weighted / self._sums.total


@dataclass(frozen=True)
class _Sums:
    """Of the blocks so far: largest score and sum of weights (…, 1), weighted sum of values (…, head_dim)."""

    largest: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor


def _by_head(states: torch.Tensor) -> torch.Tensor:
    """(rows, size, kv_heads, head_dim) → float32 (rows * kv_heads, size, head_dim), contiguous."""
    rows, size, heads, head_dim = states.shape
    return states.float().transpose(1, 2).reshape(rows * heads, size, head_dim)


def _pad_rows(states: torch.Tensor) -> torch.Tensor:
    """Pads dimension 1 with zeros up to MIN_QUERY_ROWS."""
    missing = MIN_QUERY_ROWS - states.shape[1]
    if missing <= 0:
        return states.contiguous()
    return torch.nn.functional.pad(states, (0, 0, 0, missing))
