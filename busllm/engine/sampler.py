"""Chooses the next token of each row.

Owns: the order of the work: raw log probabilities, edits, the grammar's mask, then the most likely token (temperature
0) or a draw.
Does not know: the model, the plan. A row's settings never reach another row: each part works on the rows that ask for
it and leaves the others as they are.
Next on the path: `engine/model_runner.py`, which hands the tokens back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from busllm.engine.draw import DrawSettings
from busllm.engine.grammar_mask import mask_logits
from busllm.engine.logprobs import PendingLogprobs, token_logprobs
from busllm.engine.penalties import IMPOSSIBLE, edit_logits
from busllm.engine.rng import uniform
from busllm.engine.row_scans import RowScans, TorchScans
from busllm.engine.slot_grammars import Mask
from busllm.engine.slot_states import SlotStates
from busllm.engine.staging import to_device
from busllm.plan import SampledRow


@dataclass(frozen=True)
class Sampled:
    """Tokens of a step, still on the device, or on their way to the host.

    Attributes:
        token_ids: int64 (num_rows,).
        logprob_rows: the rows whose requests asked for log probabilities.
        logprobs: of these rows; None = there are none.
        failures: rows whose sequences cannot go on under their grammars, with the reason.
        is_finite: bool (num_rows,), where `token_ids` is: whether a row's logits were numbers; None = not known here.
    """

    token_ids: torch.Tensor
    logprob_rows: tuple[int, ...]
    logprobs: PendingLogprobs | None
    failures: Mapping[int, str] = field(default_factory=dict)
    is_finite: torch.Tensor | None = None

    def rows(self, slots: Sequence[int]) -> tuple[SampledRow, ...]:
        """One entry per row; what was copied to the host must have arrived.

        Args:
            slots: whose row it is.
        """
        entries = [] if self.logprobs is None else self.logprobs.collect()
        logprobs = dict(zip(self.logprob_rows, entries, strict=True))
        finite = [True] * len(slots) if self.is_finite is None else self.is_finite.tolist()
        return tuple(
            SampledRow(
                slot, (token_id,), (logprobs[row],) if row in logprobs else (), self.failures.get(row), is_finite
            )
            for row, (slot, token_id, is_finite) in enumerate(zip(slots, self.token_ids.tolist(), finite, strict=True))
        )


def sample(
    logits: torch.Tensor,
    slots: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    states: SlotStates,
    masks: Callable[[], Mapping[int, Mask]] | None = None,
    scans: RowScans | None = None,
) -> Sampled:
    """Chooses one token per row. Does not write it to `states`.

    Args:
        logits: float32 (num_rows, vocab_size); may be overwritten.
        slots: (num_rows,), whose row it is.
        positions: (num_rows,), of the token to be chosen, counted from the prompt's first token.
        states: of the slots; all tokens below `positions` are there.
        masks: gives the masks of the rows that have a grammar; asked once, as late as possible. None = they are made
            here, by grammars that know all tokens.
        scans: looks through whole rows; None = by torch.
    """
    scans = scans or TorchScans()
    asked = [states.params(slot).logprobs for slot in slots.tolist()]
    logprob_rows = tuple(row for row, num_top in enumerate(asked) if num_top is not None)
    if not logprob_rows and states.are_plain(slots):
        token_ids, is_finite = scans.pick(logits, IMPOSSIBLE)
        return Sampled(token_ids, (), None, {}, is_finite)
    # What is not finite ends its own sequence, once the host hears of it; until then it must not stop the others.
    is_finite = scans.make_finite(logits, IMPOSSIBLE)
    with_logprobs = to_device(np.array(logprob_rows, dtype=np.int64), logits.device)
    raw = logits[with_logprobs] if logprob_rows else None  # a copy, before the edits
    edit_logits(logits, slots, positions, states)
    failures = mask_logits(logits, states.grammars.masks(slots.tolist()) if masks is None else masks())
    token_ids = _choose(logits, slots, positions, states, scans)
    logprobs = None
    if raw is not None:
        num_top = [num_top for num_top in asked if num_top is not None]
        logprobs = token_logprobs(raw, token_ids[with_logprobs], num_top)
    return Sampled(token_ids, logprob_rows, logprobs, failures, is_finite)


def _choose(
    logits: torch.Tensor,
    slots: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    states: SlotStates,
    scans: RowScans,
) -> torch.Tensor:
    drawn = np.flatnonzero(states.temperature[slots] > 0)
    if not drawn.size:
        return scans.most_likely(logits)
    own = slots[drawn]
    settings = DrawSettings(
        temperature=states.temperature[own],
        top_k=states.top_k[own],
        top_p=states.top_p[own],
        min_p=states.min_p[own],
        uniform=uniform(states.seeds[own], positions[drawn]),
    )
    if drawn.size == len(slots):
        return scans.draw(logits, settings)
    token_ids, rows = scans.most_likely(logits), to_device(drawn, logits.device)
    token_ids[rows] = scans.draw(logits[rows], settings)
    return token_ids
