"""Which tokens top-k, top-p and min-p keep, for all rows at once: for a GPU.

Owns: finding the smallest kept weight of each row by looking at the few largest first.
Does not know: temperature. `engine/kept_on_host.py` does the same row by row on the CPU, where looking deep is dear.
Next on the path: back to `engine/draw.py`, which has the definition.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from busllm.engine.staging import to_device

_DEPTHS = (64, 1024)  # how many of the most likely tokens are looked at first, and next; then all


def keep_on_device(
    weights: torch.Tensor,
    *,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
) -> torch.Tensor:
    """Zeroes what is not kept.

    Args:
        weights: float64 (num_rows, vocab_size), probabilities relative to the largest of the row; may be overwritten.
        top_k, top_p, min_p: (num_rows,), see `DrawSettings`.

    Returns:
        float64 (num_rows, vocab_size).
    """
    counted = np.flatnonzero((top_k < weights.shape[1]) | (top_p < 1))
    if counted.size:
        rows = to_device(counted, weights.device)
        weights[rows] = _keep_most_likely(weights[rows], top_k[counted], top_p[counted])
    if min_p.any():
        weights = weights.masked_fill_(weights < _column(min_p, weights), 0)
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
    return to_device(values, like.device)[:, None]
