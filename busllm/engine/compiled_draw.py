"""The draw as compiled code: a batch of rows in one call that holds no GIL, spread over the cores.

Owns: the same definition as `draw.py` gives, without looking closely at tokens that cannot matter.
Does not know: whose row it is, how many threads the step has.
Next on the path: `compiled_weights.py`, and back to `draw.py`. The readable reference is `kept_on_host.py`.

One pass finds the largest logit; another estimates, in float32, what all tokens below each of a few cuts weigh
together. The tokens above the first cut that will do are listed, and all that decides happens on the list, in float64:
their weights, the smallest kept one, the draw. Where the estimate leaves open what top-p keeps, the rest is summed in
float64, too.
Without filters there is no list: weights are summed by blocks, and one block is looked at.

`engine/cpu/kernels.py` must have said where compiled code is kept before this is imported.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from busllm.engine.compiled_kept import NUM_BUCKETS, keep, reach
from busllm.engine.compiled_weights import (
    BLOCK,
    FACTORS,
    count_above,
    estimate_rests,
    exponential,
    first_largest,
    largest_logit,
    list_above,
    sum_rest,
    sum_weights,
    weigh,
    weigh_block,
)

_CUTS = (6.0, 9.0, 12.0)  # above are the weights that are e^-6, e^-9, e^-12 of the largest or more
_DISTANCES = (np.float32(3.0), np.float32(6.0), np.float32(12.0))  # of logits from the largest, for top-k
_ESTIMATE_ERROR = 8e-6  # of the estimated rest, relative: roundings of differences, exponentials and sums
_ROUNDING = 1e-12  # of sums in float64, relative; generous
_SUMMED = 64  # listed weights that are summed together
_FEW_ROWS = 1  # rows that one core has done before others would have woken up


class Space(NamedTuple):
    """Memory to work in, a row of it for each thread.

    Attributes:
        ids: int32 (num_threads, vocab_size + BLOCK), listed tokens.
        weights: float64 (num_threads, vocab_size + BLOCK), theirs.
        members: float64 (num_threads, vocab_size + BLOCK), some of them.
        sums: float64 (num_threads, number of buckets or blocks).
    """

    ids: np.ndarray
    weights: np.ndarray
    members: np.ndarray
    sums: np.ndarray


def make_space(num_threads: int, vocab_size: int) -> Space:
    """Untouched memory, which costs nothing; lists are short as a rule."""
    size = vocab_size + BLOCK
    return Space(
        np.empty((num_threads, size), np.int32),
        np.empty((num_threads, size), np.float64),
        np.empty((num_threads, size), np.float64),
        np.empty((num_threads, max(NUM_BUCKETS, size // BLOCK)), np.float64),
    )


@njit(nogil=True, cache=True)
def draw_rows(logits, settings, space, token_ids):
    """Draws one token per row.

    Args:
        logits: float32 (num_rows, vocab_size), each row without gaps.
        settings: arrays (num_rows,): temperature, top_k, top_p, min_p, uniform; see `DrawSettings`.
        space: for as many threads as are to be used.
        token_ids: int64 (num_rows,), the result.
    """
    workers = min(len(space.ids), len(logits))
    if len(logits) <= _FEW_ROWS or workers == 1:
        _draw_some(logits, settings, space, token_ids, 0, 1)
    else:
        _draw_spread(logits, settings, space, token_ids, workers)


@njit(nogil=True, cache=True)
def find_largest(logits, token_ids, are_numbers, threads):
    """The first of the largest logits of each row, and whether all are numbers.

    Args:
        logits: float32 (num_rows, vocab_size), each row without gaps.
        token_ids: int64 (num_rows,), a result; of no use where there is NaN.
        are_numbers: bool (num_rows,), the other.
        threads: 1 = this one alone; else as many as numba was told.
    """
    if len(logits) <= _FEW_ROWS or threads == 1:
        for row in range(len(logits)):
            token_ids[row], are_numbers[row] = first_largest(logits[row])
    else:
        _find_largest_spread(logits, token_ids, are_numbers)


@njit(nogil=True, parallel=True)
def _find_largest_spread(logits, token_ids, are_numbers):
    for row in prange(len(logits)):
        token_ids[row], are_numbers[row] = first_largest(logits[row])


@njit(nogil=True, parallel=True)
def _draw_spread(logits, settings, space, token_ids, workers):
    for index in prange(workers):
        _draw_some(logits, settings, space, token_ids, np.int64(index), workers)


@njit(nogil=True)
def _draw_some(logits, settings, space, token_ids, worker, workers):
    temperature, top_k, top_p, min_p, uniform = settings
    own = (space.ids[worker], space.weights[worker], space.members[worker], space.sums[worker])
    for row in range(worker, len(logits), workers):
        filters = (top_k[row], top_p[row], min_p[row])
        token_ids[row] = _draw_row(logits[row], temperature[row], filters, uniform[row], own)


@njit(nogil=True)
def _draw_row(logits, temperature, filters, uniform, space):
    top_k, top_p, min_p = filters
    ids, weights, members, sums = space
    most, _ = largest_logit(logits)
    factor = min(1 / temperature, FACTORS)
    if top_k >= len(logits) and top_p >= 1 and min_p <= 0:
        return _draw_unfiltered(logits, most, factor, uniform, weights, sums)
    count, rest, limit = _list_likely(logits, most, temperature, filters, ids)
    weigh(logits, ids, count, most, factor, weights)
    if top_k < len(logits):
        if top_k < count:
            smallest, equal, _, _ = reach(weights, count, float(top_k), True, members, sums)
            keep(weights, count, smallest, equal)
        if top_p < 1:
            wanted = top_p * _sum_listed(weights, count)
            smallest, equal, _, _ = reach(weights, count, wanted, False, members, sums)
            keep(weights, count, smallest, equal)
    elif top_p < 1:
        listed = _sum_listed(weights, count)
        wanted = top_p * (listed + rest)
        smallest, equal, before, reached = reach(weights, count, wanted, False, members, sums)
        doubt = _ESTIMATE_ERROR * rest + _ROUNDING * wanted
        if rest > 0 and not (before + doubt < wanted <= reached - doubt):
            wanted = top_p * (listed + sum_rest(logits, most, factor, limit, members))
            smallest, equal, _, _ = reach(weights, count, wanted, False, members, sums)
        keep(weights, count, smallest, equal)
    if min_p > 0:
        keep(weights, count, min_p, count)
    return ids[_draw_listed(weights, count, uniform)]


@njit(nogil=True)
def _list_likely(logits, most, temperature, filters, ids):
    """Lists all tokens that the filters may keep.

    Returns:
        How many are listed, what all others weigh (an estimate; 0 = it does not matter), and the smallest logit that
        may be listed.
    """
    top_k, top_p, min_p = filters
    everything = np.float32(-np.inf)
    if top_k < len(logits):
        for distance in _DISTANCES:
            limit = np.float32(most - distance)
            if _is_apart(limit, most, temperature) and count_above(logits, limit) >= top_k:
                return list_above(logits, limit, ids), 0.0, limit
        return list_above(logits, everything, ids), 0.0, everything
    if top_p >= 1:
        limit = np.float32(most + (1.0001 * np.log(min(min_p, 1.0)) - 1e-6) * temperature)  # a little too low
        limit = np.nextafter(limit, everything)
        return list_above(logits, limit, ids), 0.0, limit
    limits = (
        np.float32(most - _CUTS[0] * temperature),
        np.float32(most - _CUTS[1] * temperature),
        np.float32(most - _CUTS[2] * temperature),
    )
    total, rests = estimate_rests(logits, most, min(1 / temperature, 1e38), limits)
    for cut in range(len(limits)):
        limit, rest = limits[cut], rests[cut]
        if _is_apart(limit, most, temperature) and top_p * total * 1.0001 < total - rest:
            return list_above(logits, limit, ids), rest, limit
    return list_above(logits, everything, ids), 0.0, everything


@njit(nogil=True)
def _is_apart(limit, most, temperature):
    """Whether each weight from a limit on is larger than each one below; else equals would be torn apart."""
    factor, next_below = min(1 / temperature, FACTORS), np.nextafter(limit, np.float32(-np.inf))
    lowest, highest_below = (np.float64(limit) - most) * factor, (np.float64(next_below) - most) * factor
    return exponential(lowest) > exponential(highest_below) * (1 + 1e-14)


# ---------------------------------------------------------------- the inverse of the cumulative distribution


@njit(nogil=True)
def _sum_listed(weights, count):
    summed = 0.0
    for begin in range(0, count, _SUMMED):
        summed += sum_weights(weights, begin, min(begin + _SUMMED, count))
    return summed


@njit(nogil=True)
def _draw_listed(weights, count, uniform):
    """Index of the first weight whose cumulated sum exceeds `uniform` times all; a weight of 0 is never drawn."""
    wanted, cumulated = uniform * _sum_listed(weights, count), 0.0
    for begin in range(0, count, _SUMMED):
        end = min(begin + _SUMMED, count)
        here = sum_weights(weights, begin, end)
        if cumulated + here > wanted:
            return _draw_among(weights, begin, end, wanted - cumulated)
        cumulated += here
    return _draw_among(weights, 0, count, np.inf)  # rounding has lifted what is wanted up to the sum


@njit(nogil=True)
def _draw_among(weights, begin, end, wanted):
    cumulated, last = 0.0, begin
    for index in range(begin, end):
        cumulated += weights[index]
        if weights[index] > 0:
            last = index
            if cumulated > wanted:
                break
    return last


@njit(nogil=True)
def _draw_unfiltered(logits, most, factor, uniform, weights, sums):
    """The same draw among all tokens: sums of blocks, then one block once more."""
    summed = 0.0
    for begin in range(0, len(logits), BLOCK):
        size = min(BLOCK, len(logits) - begin)
        weigh_block(logits, begin, size, most, factor, weights)
        sums[begin // BLOCK] = sum_weights(weights, 0, size)
        summed += sums[begin // BLOCK]
    wanted, cumulated, drawn, within = uniform * summed, 0.0, 0, np.inf
    for begin in range(0, len(logits), BLOCK):
        here = sums[begin // BLOCK]
        if here > 0:
            drawn = begin
        if cumulated + here > wanted:
            within = wanted - cumulated
            break
        cumulated += here
    size = min(BLOCK, len(logits) - drawn)
    weigh_block(logits, drawn, size, most, factor, weights)
    return drawn + _draw_among(weights, 0, size, within)
