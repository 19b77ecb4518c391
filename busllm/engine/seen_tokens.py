"""Which tokens a sequence in a slot has, each once, and how often it has generated each: what penalties look at.

Owns: the counts of the slots whose requests have a penalty. They are made from the slot's tokens when its first token
is chosen, so only who samples has any, and then go on token by token: a step costs what the number of different tokens
says, however long the sequence is.
Does not know: what a penalty does with a count (`engine/penalties.py`).
Next on the path: `engine/penalties.py`.

All of it is on the device, where the newest token may be before the host knows it. So a token finds its count in a
table of the vocabulary; the different ones stand in a list, whose end is the first of them again and again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from busllm.engine.staging import to_device
from busllm.errors import EngineError

Int64s = npt.NDArray[np.int64]
_UNSEEN = -1.0  # in the table of counts; 0 = only in the prompt


@dataclass(frozen=True)
class _Tables:
    """On the device, a row per slot.

    Attributes:
        counts: float32 (max_running, vocab_size), how often a token was generated.
        token_ids: int32 (max_running, width), the different ones; new ones are added behind.
        num_different: int64 (max_running,).
    """

    counts: torch.Tensor
    token_ids: torch.Tensor
    num_different: torch.Tensor


class SeenTokens:
    """Counts by slot.

    Args:
        max_running: slots.
        max_context_tokens: tokens that a slot may hold.
        vocab_size: number of logits.
        device: where counts are kept.
    """

    def __init__(self, max_running: int, max_context_tokens: int, vocab_size: int, device: torch.device) -> None:
        self._max_running = max_running
        self._width = min(max_context_tokens, vocab_size)
        self._vocab_size = vocab_size
        self._device = device
        self._tables: _Tables | None = None  # most servers never need it
        self._uncounted: dict[int, tuple[Int64s, int]] = {}  # slots whose first token has not been chosen
        self._num_known = np.zeros(max_running, dtype=np.int64)  # tokens that a slot's counts are of; 0 = has none
        self._at_most = np.zeros(max_running, dtype=np.int64)  # how many different ones there may be

    def open(self, slot: int, token_ids: Int64s, num_prompt_tokens: int) -> None:
        """A sequence with a penalty takes a slot.

        Args:
            token_ids: int64 (num_tokens,), the prompt, then what was generated before; at least one.
            num_prompt_tokens: where that begins.
        """
        self._uncounted[slot] = token_ids, num_prompt_tokens

    def close(self, slot: int) -> None:
        """The sequence leaves its slot, with a penalty or without."""
        self._uncounted.pop(slot, None)
        self._num_known[slot] = 0

    def append(self, slots: Int64s, token_ids: torch.Tensor) -> None:
        """One more generated token per slot; slots without counts are passed over.

        Args:
            slots: (num_rows,), each once.
            token_ids: int64 (num_rows,), on the device.
        """
        if self._tables is None:
            return
        rows = np.flatnonzero(self._num_known[slots])
        if not rows.size:
            return
        own, tables = slots[rows], self._tables
        where, new = to_device(own, self._device), token_ids[to_device(rows, self._device)]
        before = tables.counts[where, new]
        tables.counts[where, new] = before.clamp(min=0) + 1
        is_first = before < 0
        # A token that was there is written over the first of the free places' content by itself.
        place = tables.num_different[where].clamp(max=self._width - 1)
        tables.token_ids[where, place] = torch.where(is_first, new.int(), tables.token_ids[where, place])
        tables.num_different[where] += is_first
        self._num_known[own] += 1
        self._at_most[own] = np.minimum(self._at_most[own] + 1, self._width)

    def of(self, slots: Int64s, positions: Int64s) -> tuple[torch.Tensor, torch.Tensor]:
        """The different tokens of slots that were opened here, and how often each was generated.

        Args:
            slots: (num_rows,).
            positions: (num_rows,), how many tokens each has.

        Returns:
            Token ids, int64, and counts, float32, both (num_rows, longest) on the device. Rows with fewer tokens have
            their first one several times, with the same count.

        Raises:
            EngineError: the counts are those of more or fewer tokens.
        """
        tables = self._tables = self._tables or self._make_tables()
        for slot in slots.tolist():
            if slot in self._uncounted:
                self._count(slot, tables)
        wrong = np.flatnonzero(self._num_known[slots] != positions)
        if wrong.size:
            slot, position = int(slots[wrong[0]]), int(positions[wrong[0]])
            raise EngineError(f"slot {slot} has {position} tokens, but {self._num_known[slot]} were counted")
        where = to_device(slots, self._device)
        # Reading a number of the device would make the host wait; a few places more cost a device nothing.
        on_host = self._device.type == "cpu"
        longest = int(tables.num_different[where].max()) if on_host else int(self._at_most[slots].max())
        token_ids = tables.token_ids[where, :longest].long()
        return token_ids, tables.counts[where[:, None], token_ids]

    def _make_tables(self) -> _Tables:
        return _Tables(
            counts=torch.empty((self._max_running, self._vocab_size), device=self._device),
            token_ids=torch.empty((self._max_running, self._width), dtype=torch.int32, device=self._device),
            num_different=torch.zeros(self._max_running, dtype=torch.int64, device=self._device),
        )

    def _count(self, slot: int, tables: _Tables) -> None:
        """Fills a slot's row of the tables."""
        token_ids, num_prompt_tokens = self._uncounted.pop(slot)
        prompt, output = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
        different = np.unique(token_ids)  # sorted: who reads their logits goes through memory in one direction
        counts = np.full(self._vocab_size, _UNSEEN, dtype=np.float32)
        counts[prompt] = 0
        generated, times = np.unique(output, return_counts=True)
        counts[generated] = times
        tables.counts[slot] = to_device(counts, self._device)
        tables.token_ids[slot] = int(different[0])
        tables.token_ids[slot, : len(different)] = to_device(different.astype(np.int32), self._device)
        tables.num_different[slot] = len(different)
        self._num_known[slot] = len(token_ids)
        self._at_most[slot] = len(different)
