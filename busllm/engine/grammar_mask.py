"""Takes away the tokens that a row's grammar does not allow.

Owns: the way from the masks to the logits. Rows without a grammar are not touched.
Does not know: which tokens a grammar allows (`busllm/grammar/matcher.py`), when a mask is made
(`engine/step_masks.py`).
Next on the path: `engine/draw.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from busllm.engine.slot_grammars import Mask
from busllm.engine.staging import to_device


def mask_logits(logits: torch.Tensor, masks: Mapping[int, Mask]) -> dict[int, str]:
    """Sets what must not come to minus infinity; at least one token of a row stays finite.

    Args:
        logits: float32 (num_rows, vocab_size), finite; changed in place.
        masks: by row.

    Returns:
        Rows that cannot go on, with the reason in words for the client; they are left as they are.
    """
    allowed = {row: mask for row, mask in masks.items() if not isinstance(mask, str)}
    if allowed:
        banned = to_device(~np.stack(list(allowed.values())), logits.device)  # (num_masked, vocab_size)
        for row, its_banned in zip(allowed, banned, strict=True):
            logits[row].masked_fill_(its_banned, -torch.inf)
    return {row: mask for row, mask in masks.items() if isinstance(mask, str)}
