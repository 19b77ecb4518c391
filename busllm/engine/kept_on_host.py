"""Which tokens of one row top-k, top-p and min-p keep, and the draw among them: for the CPU.

Owns: finding the smallest kept weight without sorting the vocabulary, and the draw by cumulated weights.
Does not know: temperature, other rows. `engine/kept_on_device.py` does the same for all rows at once on a GPU.
Next on the path: back to `engine/draw.py`, which has the definition.

Top-p needs the weight at which the share of all larger ones reaches `top_p`. The weights are float64 and not negative,
so their bits, read as integers, are in the order of their values, and the upper bits are an octave and a part of it.
One pass sums the weights in each of these buckets, of the few likely ones if they suffice. The bucket in which the
share is reached is the only one whose weights have to be sorted: a thirty-second of an octave.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_SIGNIFICAND_BITS = 52
_EXPONENT_OF_ONE = 1023
_PARTS_BITS = 5  # each octave in 32 parts
_SHIFT = _SIGNIFICAND_BITS - _PARTS_BITS
_NUM_OCTAVES = 64  # what is 2^-64 of the largest or less is in the lowest bucket
_LOWEST = (_EXPONENT_OF_ONE - _NUM_OCTAVES) << _PARTS_BITS
_NUM_BUCKETS = (_NUM_OCTAVES << _PARTS_BITS) + 1
_LIKELY = (2.0**-10, 2.0**-16)  # most distributions reach their share among the few hundred or thousand weights above

Weights = npt.NDArray[np.float64]


def draw_kept(weights: Weights, *, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """Draws one token.

    Args:
        weights: float64 (vocab_size,), probabilities relative to the largest, which is 1.
        top_k, top_p, min_p, uniform: see `DrawSettings`.

    Returns:
        The token's id.
    """
    if top_k >= weights.size and top_p >= 1 and min_p <= 0:
        return _draw(weights, uniform)
    count, smallest = _count_kept(weights, top_k, top_p)
    token_ids = np.flatnonzero(weights >= smallest)
    kept = weights[token_ids]
    if token_ids.size > count:  # of those equal to the smallest, the first ones
        equal = np.flatnonzero(kept == smallest)
        superfluous = equal[count - token_ids.size :]
        token_ids, kept = np.delete(token_ids, superfluous), np.delete(kept, superfluous)
    if min_p > smallest:
        likely = kept >= min_p
        token_ids, kept = token_ids[likely], kept[likely]
    return int(token_ids[_draw(kept, uniform)])


def _draw(weights: Weights, uniform: float) -> int:
    """The inverse of the cumulative distribution, as an index; a weight of 0 is never drawn."""
    cumulated = torch.from_numpy(weights).cumsum(0).numpy()  # several times as fast as numpy's
    total = cumulated[-1]
    drawn = cumulated.searchsorted(uniform * total, side="right")
    return int(min(drawn, cumulated.searchsorted(total)))  # rounding may lift the wanted sum up to the total


def _count_kept(weights: Weights, top_k: int, top_p: float) -> tuple[int, float]:
    """How many of the largest weights top-k and top-p keep, and the smallest of them."""
    if top_k >= weights.size:
        return (weights.size, 0.0) if top_p >= 1 else _reach(weights, top_p)
    first = weights.size - top_k
    smallest = float(np.partition(weights, first)[first])
    if top_p >= 1:
        return top_k, smallest
    falling = _falling(weights[weights >= smallest])[:top_k]
    reached = falling.cumsum()
    index = _first_at_least(reached, top_p * reached[-1])
    return index + 1, float(falling[index])


def _reach(weights: Weights, top_p: float) -> tuple[int, float]:
    """How many of the largest weights have a share of `top_p` of the sum, and the smallest of them."""
    wanted = top_p * weights.sum()
    for least in (*_LIKELY, 0.0):
        likely = weights[weights >= least]
        if likely.sum() >= wanted:
            break
    buckets = likely.view(np.int64) >> _SHIFT
    buckets -= _LOWEST
    np.maximum(buckets, 0, out=buckets)
    sums = np.bincount(buckets, weights=likely, minlength=_NUM_BUCKETS)
    reached = sums[::-1].cumsum()  # from the bucket of the largest downwards
    if reached[-1] < wanted:  # other orders of summing round differently, and the share may be next to 1
        return likely.size, float(likely.min())
    place = _first_at_least(reached, wanted)
    bucket = sums.size - 1 - place
    above = reached[place - 1] if place else 0.0
    falling = _falling(likely[buckets == bucket])
    index = _first_at_least(above + falling.cumsum(), wanted)
    return int(np.count_nonzero(buckets > bucket)) + index + 1, float(falling[index])


def _falling(weights: Weights) -> Weights:
    return np.sort(weights)[::-1]


def _first_at_least(rising: Weights, wanted: float) -> int:
    """Index of the first value that is not below `wanted`; the last one when rounding keeps all below."""
    return min(int(rising.searchsorted(wanted)), rising.size - 1)
