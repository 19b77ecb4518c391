"""Decode steps recorded once and replayed: one launch instead of hundreds.

Owns: the sizes that are recorded, the fixed places that a recorded step reads its inputs from, and filling a step up
to a size.
Does not know: how a recording is made (`engine/cuda_graph.py`), how attention works, sequences.
Next on the path: `engine/model_runner.py`.

A decode step of a small model is hundreds of short kernels, and launching them takes the host longer than the device
needs to run them. A recorded step has fixed addresses and a fixed number of rows. So there is one recording per size; a
step takes the next larger one, and the rows that are added read and write a page that no sequence has. Their results
are cut off. Steps with prompt chunks have too many shapes to be recorded and are launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from busllm.engine.attention.protocol import Attention
from busllm.engine.batch import Int64s, RaggedBatch
from busllm.engine.models.protocol import CausalModel
from busllm.engine.staging import to_device

_POWERS_UP_TO = 16
_SIZES_PER_DOUBLING = 4  # so a step is filled up by at most a fifth


@runtime_checkable
class RecordableAttention(Attention, Protocol):
    """Attention whose decode steps can be recorded."""

    @property
    def scratch_page(self) -> int:
        """A page that no sequence is given, with places in the cache like any other."""
        ...

    def recordable(self, sizes: Sequence[int], max_row_pages: int) -> Mapping[int, Attention]:
        """Attention for decode steps of fixed sizes, over the same cache.

        Each one's `prepare` takes up to that many decode rows and is called before a replay; its `attend` is recorded.

        Args:
            sizes: numbers of rows.
            max_row_pages: the most pages that a row has.
        """
        ...


class RecordedStep(Protocol):
    """What was recorded."""

    @property
    def result(self) -> torch.Tensor:
        """Where each replay leaves its result."""
        ...

    def replay(self) -> None:
        """Launches it again: the same kernels on what now stands at the same addresses."""
        ...


class GraphRecorder(Protocol):
    """Records work on the device."""

    def begin(self) -> None:
        """Starts a set of recordings that share memory; those of earlier sets may be gone by now."""
        ...

    def record(self, work: Callable[[], torch.Tensor]) -> RecordedStep:
        """Runs `work` as often as needed to record it.

        Args:
            work: launches kernels and returns their result; reads no value on the host.
        """
        ...


def recorded_sizes(max_running: int) -> tuple[int, ...]:
    """Numbers of rows to record, rising: 1, 2, 4, 8, 16, 20, 24, 28, 32, 40, … and `max_running` itself."""
    sizes = [1]
    while sizes[-1] < max_running:
        last = sizes[-1]
        octave = 1 << (last.bit_length() - 1)
        sizes.append(last + (last if last < _POWERS_UP_TO else octave // _SIZES_PER_DOUBLING))
    return (*(size for size in sizes if size < max_running), max_running)


class DecodeGraphs:
    """Runs pure decode steps from recordings, which it makes when it is constructed.

    Args:
        decoder: `is_recordable`.
        attention: of the runner; its cache must be the one that all other steps use.
        recorder: makes the recordings.
        device: of all tensors.
        max_running: the most rows of a step.
        max_row_pages: the most pages of a row.
    """

    @torch.inference_mode()
    def __init__(
        self,
        decoder: CausalModel,
        attention: RecordableAttention,
        recorder: GraphRecorder,
        *,
        device: torch.device,
        max_running: int,
        max_row_pages: int,
    ) -> None:
        self._device = device
        self._page_tokens = attention.cache.shape.page_tokens
        self._scratch_slot = attention.scratch_page * self._page_tokens
        self._sizes = recorded_sizes(max_running)
        self._attention = attention.recordable(self._sizes, max_row_pages)
        # Rows: token ids, positions, places in the cache. Each recorded size reads the beginning of each.
        self._inputs = torch.zeros((3, max_running), dtype=torch.int64, device=device)
        self._inputs[2] = self._scratch_slot
        recorder.begin()
        # The largest first: the smaller ones then find all the memory they need in the pool that they share.
        self._recorded = {size: self._record(size, decoder, recorder) for size in reversed(self._sizes)}

    @property
    def sizes(self) -> tuple[int, ...]:
        """What is recorded, rising."""
        return self._sizes

    def hidden_states(self, batch: RaggedBatch, token_ids: torch.Tensor) -> torch.Tensor:
        """Runs the decoder's layers over a step of decode rows.

        Args:
            batch: decode rows only, at most `max_running`.
            token_ids: int64 (num_rows,), on the device.

        Returns:
            (num_rows, hidden_size), valid until the next call.
        """
        num_rows = batch.num_rows
        size = next(size for size in self._sizes if size >= num_rows)
        self._inputs[0, :num_rows].copy_(token_ids)  # what stands behind is some token of an earlier step
        self._inputs[1:, :size].copy_(to_device(self._padded(batch, size), self._device))
        self._attention[size].prepare(batch)
        recorded = self._recorded[size]
        recorded.replay()
        return recorded.result[:num_rows]

    def _padded(self, batch: RaggedBatch, size: int) -> Int64s:
        """Positions and places in the cache: int64 (2, size)."""
        padded = np.zeros((2, size), dtype=np.int64)
        padded[0, : batch.num_rows] = batch.positions
        padded[1] = self._scratch_slot
        padded[1, : batch.num_rows] = batch.cache_slots
        return padded

    def _record(self, size: int, decoder: CausalModel, recorder: GraphRecorder) -> RecordedStep:
        attention = self._attention[size]
        attention.prepare(_no_rows(self._page_tokens))
        token_ids, positions, cache_slots = self._inputs[:, :size]
        return recorder.record(lambda: decoder.hidden_states(token_ids, positions, cache_slots, attention))


def _no_rows(page_tokens: int) -> RaggedBatch:
    nothing, offsets = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int32)
    return RaggedBatch(
        num_decode_rows=0,
        slots=nothing,
        cu_seqlens=offsets,
        positions=nothing,
        cache_slots=nothing,
        kv_lengths=offsets[:0],
        indptr=offsets,
        indices=offsets[:0],
        last_page_len=offsets[:0],
        page_tokens=page_tokens,
    )
