"""Which of a list of weights top-k and top-p keep, as compiled code.

Owns: finding the smallest kept weight without sorting, and what becomes of the others.
Does not know: tokens, temperature, other rows.
Next on the path: back to `compiled_draw.py`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

NUM_BUCKETS = 2048
_FEW = 16  # weights that are sorted


@njit(nogil=True)
def reach(weights, count, wanted, by_number, members, sums):
    """Finds the smallest of the largest weights that together reach what is wanted; of equals no more than needed.

    The bits of numbers that are not negative are in the order of their values. So buckets are ranges of bits, each
    bucket's sum is added up from the largest downwards, and only the bucket where it is reached is looked at, likewise.

    Args:
        weights: float64 (count,) or more.
        count: how many there are.
        wanted: a sum of weights, or a number of them.
        by_number: which of the two.
        members, sums: memory to work in.

    Returns:
        The weight, how many equal to it are kept, and the sum before the last kept one and with it.
    """
    members[:count] = weights[:count]
    bits = members.view(np.int64)
    before, size = 0.0, count
    while True:
        low, high = bits[0], bits[0]
        for index in range(size):
            low, high = min(low, bits[index]), max(high, bits[index])
        if low == high or size <= _FEW:
            return _reach_among_few(members, size, wanted, by_number, before)
        shift = 0
        while (high - low) >> shift >= NUM_BUCKETS:
            shift += 1
        bucket = (high - low) >> shift
        sums[: bucket + 1] = 0.0
        for index in range(size):
            sums[(bits[index] - low) >> shift] += 1.0 if by_number else members[index]
        while bucket > 0 and before + sums[bucket] < wanted:
            before += sums[bucket]
            bucket -= 1
        kept = 0
        for index in range(size):
            value = bits[index]
            bits[kept] = value
            kept += int((value - low) >> shift == bucket)
        size = kept


@njit(nogil=True)
def _reach_among_few(members, size, wanted, by_number, before):
    """The end of `reach`: members that are few or all equal; they are sorted."""
    if size <= _FEW:
        for index in range(1, size):
            value, place = members[index], index
            while place > 0 and members[place - 1] < value:
                members[place] = members[place - 1]
                place -= 1
            members[place] = value
    equal = 0
    for index in range(size):
        equal = equal + 1 if index and members[index] == members[index - 1] else 1
        reached = before + (1.0 if by_number else members[index])
        if reached >= wanted or index == size - 1:
            return members[index], equal, before, reached
        before = reached
    return 0.0, 0, before, before


@njit(nogil=True)
def keep(weights, count, smallest, equal):
    """Leaves the larger weights and the first ones that are equal to the smallest; the others become 0."""
    found = 0
    for index in range(count):
        weight = weights[index]
        found += int(weight == smallest)
        weights[index] = weight if weight >= smallest else 0.0
    if found > equal:
        for index in range(count):
            if weights[index] == smallest:
                equal -= 1
                if equal < 0:
                    weights[index] = 0.0
