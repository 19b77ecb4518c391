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
    if not states.has_edits[slots].any():
        return
    penalised = np.flatnonzero(states.has_penalty[slots])
    if penalised.size:
        _penalise(logits, penalised, slots[penalised], positions[penalised], states)
    _add_biases(logits, slots, states)
    generated = positions - states.num_prompt_tokens[slots]
    early = np.flatnonzero(generated < states.min_tokens[slots])
    endings = [states.ending_tokens[slot] for slot in slots[early]]
    if any(map(len, endings)):
        where = np.repeat(early, list(map(len, endings))), np.concatenate(endings)
        logits[to_device(where[0], logits.device), to_device(where[1], logits.device)] = IMPOSSIBLE


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
    biases = [states.biases[slot] for slot in slots]
    counts = [len(bias.token_ids) for bias in biases]
    if any(counts):
        rows = to_device(np.repeat(np.arange(len(slots)), counts), logits.device)
        token_ids = to_device(np.concatenate([bias.token_ids for bias in biases]), logits.device)
        values = to_device(np.concatenate([bias.values for bias in biases]), logits.device)
        logits.index_put_((rows, token_ids), values, accumulate=True)
