"""Draws one token per row from its filtered distribution.

Owns: temperature, and the inverse of the cumulative distribution; the definition.
Does not know: whose row it is (everything comes as arrays with one entry per row), how the kept tokens are found.
Next on the path: `engine/kept_on_host.py` or `engine/kept_on_device.py`, then back to `engine/sampler.py`.

The definition: p = softmax(logits / temperature). Of p, keep the `top_k` most likely tokens; of these the smallest set
of most likely ones whose share of their sum reaches `top_p`; of these the ones with at least `min_p` times the largest
probability. Among equal probabilities the smaller id is the more likely. The kept tokens stand in the order of their
ids, and the token is the first whose cumulated probability exceeds `uniform` times the sum.
Sums are float64 and run in one fixed order along a row, so neighbours do not change a row; the whole vocabulary is
never sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from busllm.engine.kept_on_device import keep_on_device
from busllm.engine.kept_on_host import draw_kept
from busllm.engine.staging import to_device

_ROWS_AT_ONCE = 4  # on the CPU: their float64 weights stay in its cache


@dataclass(frozen=True)
class DrawSettings:
    """One entry per row.

    Attributes:
        temperature: float64, above 0.
        top_k: int64, 1 … vocab_size.
        top_p, min_p: float64.
        uniform: float64 in [0, 1).
    """

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    uniform: npt.NDArray[np.float64]


def draw(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Draws.

    Args:
        logits: float32 (num_rows, vocab_size); at least one of a row finite, none +inf or NaN.
        settings: of the rows.

    Returns:
        Token ids, int64 (num_rows,).
    """
    if logits.device.type != "cpu":
        return draw_on_device(logits, settings)
    return torch.tensor(
        [token_id for rows in _row_groups(len(logits)) for token_id in _draw_rows(logits, settings, rows)]
    )


def _row_groups(num_rows: int) -> list[range]:
    return [range(first, min(first + _ROWS_AT_ONCE, num_rows)) for first in range(0, num_rows, _ROWS_AT_ONCE)]


def _draw_rows(logits: torch.Tensor, settings: DrawSettings, rows: range) -> list[int]:
    some = slice(rows.start, rows.stop)
    weights = _weights(logits[some], settings.temperature[some]).numpy()
    return [
        draw_kept(
            weights[row - rows.start],
            top_k=int(settings.top_k[row]),
            top_p=float(settings.top_p[row]),
            min_p=float(settings.min_p[row]),
            uniform=float(settings.uniform[row]),
        )
        for row in rows
    ]


def draw_on_device(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """What `draw` does on other devices than the CPU; on any device the same up to the rounding of sums."""
    weights = _weights(logits, settings.temperature)
    weights = keep_on_device(weights, top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p)
    cumulated = weights.cumsum(dim=-1)
    total = cumulated[:, -1:].contiguous()
    wanted = to_device(settings.uniform, logits.device)[:, None] * total
    token_ids = torch.searchsorted(cumulated, wanted, right=True)
    last_kept = torch.searchsorted(cumulated, total)  # rounding may lift `wanted` up to the total
    return torch.minimum(token_ids, last_kept)[:, 0]


def _weights(logits: torch.Tensor, temperature: npt.NDArray[np.float64]) -> torch.Tensor:
    """Probabilities relative to the largest of the row: float64 (num_rows, vocab_size)."""
    wide = logits.double()
    return wide.sub_(wide.amax(dim=-1, keepdim=True)).div_(to_device(temperature, logits.device)[:, None]).exp_()
