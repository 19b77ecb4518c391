"""Which tokens top-k, top-p and min-p keep, for all rows at once: for a GPU.

Owns: finding the smallest kept weight of each row without sorting, and without a value that the host has to read.
Does not know: temperature. `engine/kept_on_host.py` does the same row by row on the CPU.
Next on the path: back to `engine/draw.py`, which has the definition.

The weights are float64 from 0 to 1. Their bits, read as integers, are in the order of their values, so the smallest
kept weight is found by halving an interval of integers, always as often.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from busllm.engine.staging import to_device

_BITS_OF_ONE = 0x3FF0_0000_0000_0000  # of 1.0 in float64
_NUM_HALVINGS = _BITS_OF_ONE.bit_length()


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
    limited, shared = np.flatnonzero(top_k < weights.shape[1]), np.flatnonzero(top_p < 1)
    if limited.size:
        rows = to_device(limited, weights.device)
        weights[rows] = _keep_count(weights[rows], _column(top_k[limited], weights))
    if shared.size:
        rows = to_device(shared, weights.device)
        weights[rows] = _keep_share(weights[rows], _column(top_p[shared], weights))
    if min_p.any():
        weights = weights.masked_fill_(weights < _column(min_p, weights), 0)
    return weights


def _keep_count(weights: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The `count` largest weights of each row; int64 (num_rows, 1)."""
    smallest = _smallest_kept(weights, lambda large: large.sum(dim=-1, keepdim=True) >= count)
    num_larger = (weights > smallest).sum(dim=-1, keepdim=True)
    return _cut(weights, smallest, count - num_larger)


def _keep_share(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The fewest of the largest weights of each row that have a share of its sum; float64 (num_rows, 1)."""
    wanted = share * weights.sum(dim=-1, keepdim=True)

    def sum_where(chosen: torch.Tensor) -> torch.Tensor:
        return torch.where(chosen, weights, 0).sum(dim=-1, keepdim=True)

    smallest = _smallest_kept(weights, lambda large: sum_where(large) >= wanted)
    missing = (wanted - sum_where(weights > smallest)) / smallest
    return _cut(weights, smallest, missing.ceil().clamp(min=1))


def _smallest_kept(weights: torch.Tensor, suffices: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The largest value so that the weights from it on suffice.

    Args:
        suffices: which rows have enough, bool (num_rows, 1), when these weights are kept, bool (num_rows, vocab_size).

    Returns:
        float64 (num_rows, 1).
    """
    bits = weights.view(torch.int64)
    low = bits.new_zeros((len(bits), 1))
    high = torch.full_like(low, _BITS_OF_ONE)
    for _ in range(_NUM_HALVINGS):
        middle = high - torch.div(high - low, 2, rounding_mode="floor")
        enough = suffices(bits >= middle)
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle - 1)
    return low.view(torch.float64)


def _cut(weights: torch.Tensor, smallest: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Zeroes what is below the smallest; of those equal to it, the first ones stay, as many as there is room for."""
    equal = weights == smallest
    kept = (weights > smallest) | (equal & (equal.cumsum(dim=-1) <= room))
    return weights.masked_fill(~kept, 0)


def _column(values: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return to_device(values, like.device)[:, None]
