"""One rank chooses, all know.

Owns: sampling at the first rank, and the way of the chosen ids to the others, who need them as inputs.
Does not know: how a token is chosen (`engine/sampler.py`).
Next on the path: `engine/model_runner.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from busllm.engine.parallel.group import Group
from busllm.engine.row_scans import RowScans
from busllm.engine.sampler import Sampled, sample
from busllm.engine.slot_states import SlotStates
from busllm.engine.step_masks import Masks


def sample_together(
    logits: torch.Tensor,
    slots: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    states: SlotStates,
    masks: Callable[[], Masks],
    group: Group,
    scans: RowScans,
) -> Sampled:
    """Chooses one token per row at the first rank and tells it to the others.

    Args:
        logits: as `engine.sampler.sample` takes them; looked at by the first rank only.
        slots, positions: (num_rows,), see there.
        states: of the slots.
        masks, scans: see there.

    Returns:
        The same tokens at every rank; log probabilities at the first only.
    """
    if group.shard.is_first:
        sampled = sample(logits, slots, positions, states, masks, scans)
        return replace(sampled, token_ids=group.from_first(sampled.token_ids))
    token_ids = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
    return Sampled(group.from_first(token_ids), (), None)
