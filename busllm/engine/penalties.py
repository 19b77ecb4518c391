"""Edits of the logits that a request asks for, before a token is chosen.

Owns: penalties, logit bias, the ban of ends before `min_tokens`; rows without such settings are not touched.
Does not know: temperature and filters (`engine/draw.py`).
Next on the path: `engine/draw.py`.

Order: repetition penalty, frequency and presence penalty, logit bias, banned tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from busllm.engine.slot_states import SlotStates
from busllm.engine.staging import to_device

IMPOSSIBLE = torch.finfo(torch.float32).min  # not -inf: a row with every token banned must not become NaN


def edit_logits(
    logits: torch.Tensor,
    slots: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    states: SlotStates,
) -> None:
    """Edits in place.

    Args:
        logits: float32 (num_rows, vocab_size).
        slots: (num_rows,), whose row it is.
        positions: (num_rows,), of the token to be chosen; `states` has all tokens below.
        states: of the slots.
    """
    penalised = np.flatnonzero(states.has_penalty[slots])
    if penalised.size:
        _penalise(logits, penalised, slots[penalised], positions[penalised], states)
    _add_biases(logits, slots, states)
    generated = positions - states.num_prompt_tokens[slots]
    banned = [
        (row, token_id)
        for row in np.flatnonzero(generated < states.min_tokens[slots])
        for token_id in states.ending_tokens(int(slots[row]))
    ]
    if banned:
        rows, token_ids = np.array(banned, dtype=np.int64).T
        logits[to_device(rows, logits.device), to_device(token_ids, logits.device)] = IMPOSSIBLE


def _penalise(
    logits: torch.Tensor,
    rows: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    states: SlotStates,
) -> None:
    """Reads and writes the logits of tokens that were seen, not the whole vocabulary."""
    device = logits.device
    tokens, counts = states.seen.of(slots, positions)  # a token that stands there twice is written twice, the same

    def column(values: npt.NDArray[np.float32]) -> torch.Tensor:
        return to_device(values[slots], device)[:, None]

    seen = to_device(rows, device)[:, None], tokens
    values = logits[seen]  # (num_penalised, longest)
    repetition = column(states.repetition)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= column(states.frequency) * counts
    values -= column(states.presence) * (counts > 0)
    logits[seen] = values


def _add_biases(logits: torch.Tensor, slots: npt.NDArray[np.int64], states: SlotStates) -> None:
    biases = [
        (row, token_id, value)
        for row, slot in enumerate(slots.tolist())
        for token_id, value in states.params(slot).logit_bias
    ]
    if biases:
        rows, token_ids, values = (np.array(part) for part in zip(*biases, strict=True))
        where = to_device(rows, logits.device), to_device(token_ids, logits.device)
        logits.index_put_(where, to_device(values.astype(np.float32), logits.device), accumulate=True)
