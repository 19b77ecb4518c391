"""The compiled attention as a backend: owner of the KV cache's layout.

Owns: `CpuAttention` and `BlockedKVCache`, the memory of keys and values, and the cutting of a step into pieces.
Does not know: the model. The decoder of this package reads `batch` and calls the kernels itself; `attend` serves any
other decoder.
Next on the path: `attention.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from busllm.engine.attention.protocol import AttentionConfig
from busllm.engine.batch import RaggedBatch
from busllm.engine.cpu.attention import attend
from busllm.engine.cpu.pack import aligned_zeros
from busllm.engine.cpu.pieces import cut
from busllm.engine.cpu.runs import BLOCK
from busllm.engine.cpu.shapes import VECTOR, Batch, Cache, Heads, padded
from busllm.engine.cpu.threads import num_threads
from busllm.engine.kv_cache import KVShape
from busllm.errors import ConfigError, EngineError, ModelError

UNLIMITED = 1 << 40  # a window beyond every context

Int64s = npt.NDArray[np.int64]


def bytes_per_position(num_kv_heads: int, head_dim: int) -> int:
    """Of keys and values of one token in one layer; values are padded to whole vectors."""
    return num_kv_heads * (head_dim + padded(head_dim, VECTOR)) * np.dtype(np.uint16).itemsize


class BlockedKVCache:
    """Keys and values in bfloat16; a page is one contiguous block of keys and one of values, see `Cache`."""

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        width = padded(shape.head_dim, VECTOR)
        outer = (shape.num_pages, shape.num_layers, shape.num_kv_heads, shape.page_tokens // BLOCK)
        self.arrays = Cache(
            keys=aligned_zeros((*outer, shape.head_dim // 2, BLOCK, 2), np.uint16),
            values=aligned_zeros((*outer, BLOCK // 2, width, 2), np.uint16),
        )

    @property
    def shape(self) -> KVShape:
        """The sizes it was made with."""
        return self._shape

    @property
    def host_memory(self) -> tuple[tuple[int, int], ...]:
        """That of keys and that of values."""
        return tuple((each.ctypes.data, each.nbytes) for each in self.arrays)

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes one token's heads to each slot, rounded to bfloat16."""
        where = slots.numpy()
        pages, offsets = np.divmod(where, self._shape.page_tokens)
        blocks, tokens = np.divmod(offsets, BLOCK)
        # The token's place comes first in what numpy selects: (num_tokens, num_kv_heads, …).
        key_pairs = _bits(keys).reshape(len(where), self._shape.num_kv_heads, -1, 2)
        self.arrays.keys[pages, layer, :, blocks, :, tokens] = key_pairs
        width = self._shape.head_dim
        self.arrays.values[pages, layer, :, blocks, tokens // 2, :width, tokens % 2] = _bits(values)

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads pages, token-major, as bfloat16."""
        shape, chosen = self._shape, pages.numpy()
        num_rows, num_tokens = chosen.shape[0], chosen.shape[1] * shape.page_tokens
        size = (num_rows, num_tokens, shape.num_kv_heads, shape.head_dim)
        # (rows, pages, kv_heads, blocks, pairs, 16, 2) → (rows, pages, blocks, 16, kv_heads, pairs, 2)
        keys = self.arrays.keys[chosen, layer].transpose(0, 1, 3, 5, 2, 4, 6).reshape(size)
        # (rows, pages, kv_heads, blocks, 8, width, 2) → (rows, pages, blocks, 8, 2, kv_heads, width)
        values = self.arrays.values[chosen, layer].transpose(0, 1, 3, 4, 6, 2, 5)
        values = values[..., : shape.head_dim].reshape(size)
        return _from_bits(keys), _from_bits(values)


class CpuAttention:
    """Implements `Attention` with compiled code.

    Raises:
        ConfigError: pages are not whole blocks of 16 tokens.
        ModelError: the model has a soft cap or sinks.
    """

    def __init__(self, config: AttentionConfig) -> None:
        kv = config.kv
        if kv.page_tokens % BLOCK:
            raise ConfigError(
                f"is {kv.page_tokens}; the compiled forward pass needs a multiple of {BLOCK}.",
                key="scheduler.page_tokens",
            )
        if config.soft_cap is not None or config.layer_sinks is not None:
            raise ModelError("The compiled attention has neither a soft cap nor sinks; use attention = 'torch'.")
        self._cache = BlockedKVCache(kv)
        self.windows: Int64s = np.array([UNLIMITED if w is None else w for w in config.layer_windows], dtype=np.int64)
        self.heads = Heads(
            num_heads=config.num_heads,
            num_kv_heads=kv.num_kv_heads,
            head_dim=kv.head_dim,
            padded_head_dim=padded(kv.head_dim, VECTOR),
            page_tokens=kv.page_tokens,
            num_threads=num_threads(),
            scale=config.scale,
        )
        self._batch: Batch | None = None

    @property
    def cache(self) -> BlockedKVCache:
        """Where the decoder stores a step's keys and values before it attends."""
        return self._cache

    @property
    def batch(self) -> Batch:
        """The step that was prepared; its token ids are zeros.

        Raises:
            EngineError: none was.
        """
        if self._batch is None:
            raise EngineError("attention was used before a step was prepared")
        return self._batch

    def prepare(self, batch: RaggedBatch) -> None:
        """Takes a step's rows."""
        self._batch = Batch(
            token_ids=np.zeros(batch.num_tokens, dtype=np.int64),
            positions=batch.positions,
            cache_slots=batch.cache_slots,
            items=cut_pieces(batch, self.heads),
            pages=batch.indices.astype(np.int64),
            page_starts=batch.indptr.astype(np.int64),
        )

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attends in one layer: (num_tokens, num_heads, head_dim), same shape and dtype back."""
        flat = _bits(queries.float() * self.heads.scale).reshape(len(queries), -1)
        out = np.zeros(flat.shape, dtype=np.float32)
        arrays = self._cache.arrays
        attend(flat, arrays.keys, arrays.values, layer, self.batch, self.windows[layer], self.heads, out)
        return torch.from_numpy(out).view(queries.shape).to(queries.dtype)


def cut_pieces(batch: RaggedBatch, heads: Heads) -> Int64s:
    """`Batch.items` of a step, dealt so that equal shares of consecutive pieces are about equally much work."""
    items: Int64s = cut(batch.cu_seqlens, batch.positions, heads.num_heads, heads.num_kv_heads, heads.num_threads)
    return items


def _bits(states: torch.Tensor) -> npt.NDArray[Any]:
    """Rounded to bfloat16, as uint16, NaN as 0."""
    rounded: npt.NDArray[Any] = torch.nan_to_num(states.float()).bfloat16().contiguous().view(torch.int16).numpy()
    return rounded.view(np.uint16)


def _from_bits(bits: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)
