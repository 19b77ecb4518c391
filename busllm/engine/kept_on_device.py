"""Which tokens top-k, top-p and min-p keep, for all rows at once: for a GPU.

Owns: finding the smallest kept weight of each row without sorting, and without a value that the host has to read.
Does not know: temperature. `engine/kept_on_host.py` does the same row by row on the CPU.
Next on the path: back to `engine/draw.py`, which has the definition.

A small top-k is a selection of the library's; top-p then has only these weights to look at. Without one, how many
weights top-p keeps is not known to the host, so all are looked at: the weights are float64 from 0 to 1, and their bits,
read as integers, are in the order of their values. So the smallest kept weight is found by halving an interval of
integers, always as often.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from busllm.engine.staging import to_device

_BITS_OF_ONE = 0x3FF0_0000_0000_0000  # of 1.0 in float64
_NUM_HALVINGS = _BITS_OF_ONE.bit_length()
# A top-k up to this is selected. Always as many are, so that no row depends on what others ask for.
_NUM_SELECTED = 1024


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
    is_limited = top_k < weights.shape[1]
    is_selected = is_limited & (top_k <= _NUM_SELECTED)
    selected, limited = np.flatnonzero(is_selected), np.flatnonzero(is_limited & ~is_selected)
    shared = np.flatnonzero((top_p < 1) & ~is_selected)
    if selected.size:
        rows = to_device(selected, weights.device)
        weights[rows] = _select(weights[rows], _column(top_k[selected], weights), _column(top_p[selected], weights))
    if limited.size:
        rows = to_device(limited, weights.device)
        weights[rows] = _keep_count(weights[rows], _column(top_k[limited], weights))
    if shared.size:
        rows = to_device(shared, weights.device)
        weights[rows] = _keep_share(weights[rows], _column(top_p[shared], weights))
    if min_p.any():
        weights = weights.masked_fill_(weights < _column(min_p, weights), 0)
    return weights


def _select(weights: torch.Tensor, count: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The `count` largest weights of each row, and of these the fewest largest that have a share of their sum.

    Args:
        count: int64 (num_rows, 1), 1 … _NUM_SELECTED.
        share: float64 (num_rows, 1); 1 and more keeps all.
    """
    size = min(_NUM_SELECTED, weights.shape[1])
    places = torch.arange(size, device=weights.device)
    falling = weights.topk(size, dim=-1).values.masked_fill(places >= count, 0)  # (num_rows, size)
    reached = falling.cumsum(dim=-1)
    num_needed = (reached < share * reached[:, -1:]).sum(dim=-1, keepdim=True) + 1
    num_kept = torch.where(share < 1, torch.minimum(num_needed, count), count)
    smallest = falling.gather(1, num_kept - 1)
    return _cut(weights, smallest, num_kept - (falling > smallest).sum(dim=-1, keepdim=True))


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
