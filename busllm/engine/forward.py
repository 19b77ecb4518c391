"""A step's way through the decoder: inputs to the device, then layer by layer or from a recording.

Owns: gathering the step's input tokens on the device, and the choice between the two ways.
Does not know: pages, sampling, what a row is for.
Next on the path: `engine/models/decoder.py`.

An input token may be one that the host has not seen: the slot sampled it in a step that still runs. So such tokens are
taken from the slots' token array on the device, behind the kernel that writes them there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from busllm.engine.attention.protocol import Attention
from busllm.engine.batch import RaggedBatch, input_tokens
from busllm.engine.graphs import DecodeGraphs, GraphRecorder, RecordableAttention
from busllm.engine.models.protocol import CausalModel
from busllm.engine.slot_states import SlotStates
from busllm.engine.staging import to_device_together
from busllm.plan import PlanRow


@dataclass(frozen=True)
class Forward:
    """Runs a decoder over the rows of a step.

    Attributes:
        decoder: the model.
        attention: for all steps that are not recorded.
        slots: hold the tokens that rows name by reference.
        graphs: for steps of decode rows alone; None = every step is launched kernel by kernel.
    """

    decoder: CausalModel
    attention: Attention
    slots: SlotStates
    graphs: DecodeGraphs | None = None

    def hidden_states(self, rows: tuple[PlanRow, ...], batch: RaggedBatch) -> torch.Tensor:
        """Starts the layers.

        Args:
            rows: of the plan.
            batch: the same rows.

        Returns:
            (num_tokens, hidden_size), valid until the next call.
        """
        token_ids, positions, cache_slots = self._inputs(rows, batch)
        if self.graphs is not None and batch.num_decode_rows == batch.num_rows:
            return self.graphs.hidden_states(batch, token_ids)
        self.attention.prepare(batch)
        return self.decoder.hidden_states(token_ids, positions, cache_slots, self.attention)

    def _inputs(self, rows: tuple[PlanRow, ...], batch: RaggedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and places in the cache: int64 (num_tokens,) each, on the device."""
        device, given = self.slots.shape.device, (input_tokens(rows), batch.positions, batch.cache_slots)
        named = [index for index, row in enumerate(rows) if row.from_step is not None]
        if not named:
            token_ids, positions, cache_slots = to_device_together(given, device)
            return token_ids, positions, cache_slots
        where = batch.cu_seqlens[named].astype(np.int64)  # a row that names its input has no other
        token_ids, positions, cache_slots, to, slots, starts = to_device_together(
            (*given, where, batch.slots[named], batch.positions[where]), device
        )
        token_ids[to] = self.slots.tokens[slots, starts]
        return token_ids, positions, cache_slots


def make_forward(
    decoder: CausalModel, attention: Attention, slots: SlotStates, recorder: GraphRecorder | None
) -> Forward:
    """Records decode steps where that is possible: with a recorder, for a decoder and attention that allow it."""
    if recorder is None or not decoder.is_recordable or not isinstance(attention, RecordableAttention):
        return Forward(decoder, attention, slots)
    graphs = DecodeGraphs(
        decoder,
        attention,
        recorder,
        device=slots.shape.device,
        max_running=slots.shape.max_running,
        max_row_pages=-(-slots.shape.max_context_tokens // attention.cache.shape.page_tokens),
    )
    return Forward(decoder, attention, slots, graphs)
