"""Where keys and values live.

Owns: the memory of the paged KV cache and its layout, behind `store` and `gather`.
Does not know: which sequence a page belongs to, which pages are free (`engine/pages.py`), attention.
Next on the path: `engine/attention/`, whose backends may bring another layout.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import torch


class KVShape(msgspec.Struct, frozen=True):
    """Sizes of a paged KV cache.

    Attributes:
        num_layers, num_kv_heads, head_dim: of the model (of this rank's part of it).
        num_pages, page_tokens: of the pool.
        dtype, device: of the stored numbers.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_tokens: int
    dtype: torch.dtype
    device: torch.device


class KVCache(Protocol):
    """Keys and values of all layers, by page. A slot is a place for one token: page * page_tokens + offset."""

    @property
    def shape(self) -> KVShape:
        """The sizes it was made with."""
        ...

    @property
    def host_memory(self) -> tuple[tuple[int, int], ...]:
        """Address and bytes of each block of the host's memory that may be used before there are tokens; () = none."""
        ...

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes one token's heads to each slot.

        Args:
            layer: which.
            keys, values: (num_tokens, num_kv_heads, head_dim).
            slots: int64 (num_tokens,).
        """
        ...

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads pages, token-major.

        Args:
            layer: which.
            pages: int64 (num_rows, num_pages_of_each).

        Returns:
            Keys and values, each (num_rows, num_pages_of_each * page_tokens, num_kv_heads, head_dim).
        """
        ...


class TokenMajorKVCache:
    """A page is one contiguous block per layer and K or V: page_tokens x num_kv_heads x head_dim."""

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        size = (
            shape.num_layers,
            shape.num_pages,
            shape.page_tokens,
            shape.num_kv_heads,
            shape.head_dim,
        )
        self.keys = _zeros(size, shape)
        self.values = _zeros(size, shape)
        by_slot = (
            shape.num_layers,
            shape.num_pages * shape.page_tokens,
            shape.num_kv_heads,
            shape.head_dim,
        )
        self._keys_by_slot = self.keys.view(by_slot)
        self._values_by_slot = self.values.view(by_slot)

    @property
    def shape(self) -> KVShape:
        """The sizes it was made with."""
        return self._shape

    @property
    def host_memory(self) -> tuple[tuple[int, int], ...]:
        """That of keys and that of values."""
        on_host = [each for each in (self.keys, self.values) if each.device.type == "cpu"]
        return tuple((each.data_ptr(), each.nbytes) for each in on_host)

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes one token's heads to each slot."""
        self._keys_by_slot[layer].index_copy_(0, slots, keys)
        self._values_by_slot[layer].index_copy_(0, slots, values)

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads pages, token-major."""
        num_rows, num_pages = pages.shape
        by_token = (
            num_rows,
            num_pages * self._shape.page_tokens,
            self._shape.num_kv_heads,
            self._shape.head_dim,
        )
        flat = pages.reshape(-1)
        keys = self.keys[layer].index_select(0, flat)  # (num_rows * num_pages, page_tokens, num_kv_heads, head_dim)
        values = self.values[layer].index_select(0, flat)
        return keys.view(by_token), values.view(by_token)


def _zeros(size: tuple[int, ...], shape: KVShape) -> torch.Tensor:
    """Zeros, not garbage: a masked key has weight 0, and 0 times a garbage NaN would be NaN."""
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    # numpy leaves fresh zeros to the operating system: memory is used as tokens arrive, or in a server's idle time.
    num_bytes = int(np.prod(size)) * shape.dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(shape.dtype).view(size)
