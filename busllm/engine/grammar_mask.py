"""Takes away the tokens that a row's grammar does not allow.

Owns: the way from the tokens on the device to the matchers, and from their answer to the logits. Rows without a grammar
are not touched.
Does not know: which tokens a grammar allows (`busllm/grammar/matcher.py`).
Next on the path: `engine/draw.py`.

The mask of a row depends on its newest token. At depth 0 that is known. At depth 1 the host waits here for the step
that samples it, while the device already computes this one; the step after that is planned later for it. Without any
grammar in the step nothing waits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from busllm.engine.slot_states import SlotStates
from busllm.engine.staging import to_device
from busllm.errors import InvalidRequest


def mask_logits(
    logits: torch.Tensor,
    slots: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    states: SlotStates,
) -> dict[int, str]:
    """Sets what must not come to minus infinity; at least one token of a row stays finite.

    Args:
        logits: float32 (num_rows, vocab_size), finite; changed in place.
        slots: (num_rows,), whose row it is.
        positions: (num_rows,), of the token to be chosen; all tokens below are in `states.tokens`.
        states: of the slots.

    Returns:
        Rows that cannot go on, with the reason in words for the client; they are left as they are.
    """
    rows = np.flatnonzero(states.has_grammar[slots])
    failures: dict[int, str] = {}
    if not rows.size:
        return failures
    masked: list[int] = []
    masks: list[npt.NDArray[np.bool_]] = []
    for row, allowed in zip(rows.tolist(), _allowed(slots[rows], positions[rows], states), strict=True):
        if isinstance(allowed, str):
            failures[row] = allowed
        else:
            masked.append(row)
            masks.append(allowed)
    if masks:
        banned = to_device(~np.stack(masks), logits.device)  # (num_masked, vocab_size)
        for row, its_banned in zip(masked, banned, strict=True):
            logits[row].masked_fill_(its_banned, -torch.inf)
    return failures


def _allowed(
    slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], states: SlotStates
) -> list[npt.NDArray[np.bool_] | str]:
    """The mask of each slot, or why there is none."""
    firsts: list[int | str] = []
    for slot in slots.tolist():
        try:
            firsts.append(int(states.num_prompt_tokens[slot]) + states.grammars.num_taken(slot, states.grammar(slot)))
        except InvalidRequest as error:
            firsts.append(error.message)
    found = np.array([positions[i] if isinstance(first, str) else first for i, first in enumerate(firsts)])
    new_tokens = _read_tokens(slots, found, positions, states)
    return [
        first if isinstance(first, str) else _allowed_in_slot(slot, token_ids, states)
        for slot, first, token_ids in zip(slots.tolist(), firsts, new_tokens, strict=True)
    ]


def _allowed_in_slot(slot: int, token_ids: list[int], states: SlotStates) -> npt.NDArray[np.bool_] | str:
    try:
        return states.grammars.allowed(slot, states.grammar(slot), states.params(slot), token_ids)
    except InvalidRequest as error:
        return error.message


def _read_tokens(
    slots: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], states: SlotStates
) -> list[list[int]]:
    """The tokens of each slot at the positions first … end-1; one copy from the device for all."""
    longest = int((ends - firsts).max())
    if longest == 0:
        return [[] for _ in slots]
    where = np.minimum(firsts[:, None] + np.arange(longest), ends[:, None] - 1)  # (num_rows, longest)
    device = states.tokens.device
    block = states.tokens[to_device(slots, device)[:, None], to_device(where, device)].tolist()
    return [tokens[:count] for tokens, count in zip(block, (ends - firsts).tolist(), strict=True)]
