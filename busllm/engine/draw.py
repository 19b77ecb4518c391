"""Draws one token per row from its filtered distribution.

Owns: temperature, top-k, top-p, min-p, and the inverse of the cumulative distribution.
Does not know: whose row it is; everything comes as arrays with one entry per row.
Next on the path: back to `engine/sampler.py`.

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

_DEPTHS = (64, 1024)  # how many of the most likely tokens are looked at first, and next; then all


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
        logits: float32 (num_rows, vocab_size), finite.
        settings: of the rows.

    Returns:
        Token ids, int64 (num_rows,).
    """
    weights = _filtered(logits, settings)
    cumulated = weights.cumsum(dim=-1)
    total = cumulated[:, -1:].contiguous()
    wanted = _column(settings.uniform, logits) * total
    token_ids = torch.searchsorted(cumulated, wanted, right=True)
    last_kept = torch.searchsorted(cumulated, total)  # rounding may lift `wanted` up to the total
    return torch.minimum(token_ids, last_kept)[:, 0]


def _filtered(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Weights of the tokens, float64 (num_rows, vocab_size): 1 for the most likely, 0 for what is left out."""
    wide = logits.double()
    weights = ((wide - wide.amax(dim=-1, keepdim=True)) / _column(settings.temperature, logits)).exp_()
    counted = np.flatnonzero((settings.top_k < logits.shape[1]) | (settings.top_p < 1))
    if counted.size:
        rows = torch.from_numpy(counted).to(logits.device)
        weights[rows] = _keep_most_likely(weights[rows], settings.top_k[counted], settings.top_p[counted])
    if settings.min_p.any():
        weights = weights.masked_fill_(weights < _column(settings.min_p, logits), 0)
    return weights


def _keep_most_likely(
    weights: torch.Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64]
) -> torch.Tensor:
    """Zeroes all but the tokens that top-k and top-p keep."""
    count, threshold = _count_kept(weights, top_k, top_p)
    above = weights > threshold
    equal = weights == threshold
    room = count - above.sum(dim=-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=-1) <= room))
    return weights.masked_fill(~kept, 0)


def _count_kept(
    weights: torch.Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the largest weights stay, int64 (num_rows, 1), and the smallest of them, float64 (num_rows, 1).

    It looks at the few largest first. Rows for which these are not enough are looked at again, deeper.
    """
    vocab_size = weights.shape[1]
    limit, share = _column(top_k, weights), _column(top_p, weights)
    everything = weights.cumsum(dim=-1)[:, -1:]
    count, threshold = torch.empty_like(limit), torch.empty_like(everything)
    largest_limit = int(top_k[top_k < vocab_size].max(initial=1))
    rows = torch.arange(len(top_k), device=weights.device)
    depths = [depth for depth in _DEPTHS if largest_limit <= depth < vocab_size]
    for depth in (*depths, vocab_size):
        own_limit, own_share = limit[rows], share[rows]
        largest = weights[rows].topk(depth, dim=-1).values  # (num_rows, depth), falling
        reached = largest.cumsum(dim=-1)
        limited_sum = reached.gather(1, own_limit.clamp(max=depth) - 1)
        wanted = own_share * torch.where(own_limit < vocab_size, limited_sum, everything[rows])
        by_share = (reached < wanted).sum(dim=-1, keepdim=True) + 1
        kept = torch.where(own_share < 1, torch.minimum(by_share, own_limit), own_limit).clamp(max=depth)
        count[rows], threshold[rows] = kept, largest.gather(1, kept - 1)
        is_open = (own_share < 1) & (reached[:, -1:] < wanted)
        rows = rows[is_open[:, 0]]
        if not len(rows):
            break
    return count, threshold


def _column(values: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]
