"""Attention by FlashInfer's paged kernels, on CUDA.

Owns: a KV cache in the layout NHD, one wrapper per kind of row and window, and what a step's rows mean for them.
Does not know: the model, requests, how graphs are recorded (`engine/graphs.py`).
Next on the path: back to `engine/models/decoder.py`.

Decode rows and prompt chunks of a step have a kernel each. Both read the same pages: those of a row hold all of its
positions up to its own last one, so a chunk attends to what was cached before it with a causal mask that is aligned at
the end. Layers with the same window share a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from busllm.engine.attention.flashinfer_kernel import PagedKernel
from busllm.engine.attention.flashinfer_library import (
    FlashInferLibrary,
    PagedWrapper,
    limit_of_kernels,
    load_flashinfer,
)
from busllm.engine.attention.paged_rows import decode_rows, pad_decode_rows, prefill_rows
from busllm.engine.attention.protocol import AttentionConfig
from busllm.engine.batch import RaggedBatch
from busllm.engine.kv_cache import TokenMajorKVCache
from busllm.errors import ModelError

# Partial results of rows whose keys are split among many blocks of threads. The library recommends 128 MiB; wide models
# (128 heads of 128 numbers, 256 rows) need about twice that.
WORKSPACE_BYTES = 384 * 2**20
LAYOUT = "NHD"  # a page is page_tokens x num_kv_heads x head_dim


class FlashInferAttention:
    """Implements `Attention`, and `RecordableAttention` for decode steps.

    Args:
        config: sizes; bfloat16 or float16.
        library: the package; None = import it.
        workspace_bytes: of the buffer that all wrappers share. They may, since they run one after the other.

    Raises:
        MissingPackage: FlashInfer is not installed.
        ModelError: its kernels cannot compute this attention.
    """

    def __init__(
        self,
        config: AttentionConfig,
        library: FlashInferLibrary | None = None,
        *,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        reason = limit_of_kernels(config.kv.head_dim, config.kv.dtype, has_sinks=config.layer_sinks is not None)
        if reason is not None:
            raise ModelError(f'FlashInfer cannot serve this model: {reason}. Set scheduler.attention to "torch".')
        self._config = config
        self._library = library or load_flashinfer()
        # One page more than the pool has: what is stored for rows that only fill a recorded step up goes there.
        self._cache = TokenMajorKVCache(msgspec.structs.replace(config.kv, num_pages=config.kv.num_pages + 1))
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=config.kv.device)
        windows = frozenset(config.layer_windows)
        self._decode = PagedKernel(config, {window: self._decode_wrapper() for window in windows})
        self._prefill = PagedKernel(config, {window: self._prefill_wrapper() for window in windows}, is_prefill=True)
        self._num_decode_rows = 0
        self._has_prefill = False

    @property
    def cache(self) -> TokenMajorKVCache:
        """Where the decoder stores a step's keys and values before it attends."""
        return self._cache

    @property
    def scratch_page(self) -> int:
        """A page that no sequence is given."""
        return self._config.kv.num_pages

    def prepare(self, batch: RaggedBatch) -> None:
        """Takes a step's rows."""
        decode, prefill = decode_rows(batch), prefill_rows(batch)
        self._num_decode_rows, self._has_prefill = decode.num_rows, prefill.num_rows > 0
        if self._num_decode_rows:
            self._decode.plan(decode)
        if self._has_prefill:
            self._prefill.plan(prefill)

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attends in one layer: (num_tokens, num_heads, head_dim), same shape back."""
        queries = queries.contiguous()
        out = torch.empty_like(queries)
        pages = self._cache.keys[layer], self._cache.values[layer]
        decoding = slice(0, self._num_decode_rows)  # a decode row has one token
        prefilling = slice(self._num_decode_rows, None)
        if self._num_decode_rows:
            self._decode.run(layer, queries[decoding], pages, out[decoding])
        if self._has_prefill:
            self._prefill.run(layer, queries[prefilling], pages, out[prefilling])
        return out

    def recordable(self, sizes: Sequence[int], max_row_pages: int) -> Mapping[int, RecordableRows]:
        """Attention for decode steps of fixed sizes, over this cache.

        Args:
            sizes: numbers of rows.
            max_row_pages: the most pages that a row has.

        Returns:
            By size. What they plan with lies at fixed places, which they share: one step is planned at a time.
        """
        device, largest = self._config.kv.device, max(sizes)
        places = _Places(
            indptr=torch.zeros(largest + 1, dtype=torch.int32, device=device),
            indices=torch.zeros(largest * max_row_pages, dtype=torch.int32, device=device),
            last_page_len=torch.ones(largest, dtype=torch.int32, device=device),
        )
        return {size: self._recordable_rows(size, places) for size in sizes}

    def _recordable_rows(self, size: int, places: _Places) -> RecordableRows:
        wrappers = {window: self._decode_wrapper(size, places) for window in frozenset(self._config.layer_windows)}
        return RecordableRows(size, self._cache, PagedKernel(self._config, wrappers), self.scratch_page)

    def _decode_wrapper(self, size: int = 0, places: _Places | None = None) -> PagedWrapper:
        # Tensor cores also for one query per row: then all numbers of query heads per KV head are possible, and the
        # heads that share keys are computed together.
        if places is None:
            return self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, kv_layout=LAYOUT, use_tensor_cores=True, backend="fa2"
            )
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            kv_layout=LAYOUT,
            use_tensor_cores=True,
            backend="fa2",
            use_cuda_graph=True,
            paged_kv_indptr_buffer=places.indptr[: size + 1],
            paged_kv_indices_buffer=places.indices,
            paged_kv_last_page_len_buffer=places.last_page_len[:size],
        )

    def _prefill_wrapper(self) -> PagedWrapper:
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout=LAYOUT, backend="auto")


@dataclass(frozen=True)
class _Places:
    """Where recorded kernels read a plan: int32 (rows + 1,), (pages,), (rows,)."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


class RecordableRows:
    """Implements `Attention` for a fixed number of decode rows; fewer are filled up."""

    def __init__(self, num_rows: int, cache: TokenMajorKVCache, kernel: PagedKernel, scratch_page: int) -> None:
        self._num_rows = num_rows
        self._cache = cache
        self._kernel = kernel
        self._scratch_page = scratch_page

    @property
    def cache(self) -> TokenMajorKVCache:
        """That of the attention which made this."""
        return self._cache

    def prepare(self, batch: RaggedBatch) -> None:
        """Takes decode rows, at most the fixed number; outside of what is recorded."""
        self._kernel.plan(pad_decode_rows(decode_rows(batch), self._num_rows, self._scratch_page))

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attends in one layer: (num_rows, num_heads, head_dim), same shape back. This is what is recorded."""
        queries = queries.contiguous()
        out = torch.empty_like(queries)
        self._kernel.run(layer, queries, (self._cache.keys[layer], self._cache.values[layer]), out)
        return out
