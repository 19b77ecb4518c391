"""What happens to each row on its own between the linears: norms, number formats, the activation, rotation.

Owns: these operations, each on one row. Sums are added in vectors of 16 in a fixed order.
Does not know: batches; `step.py` spreads rows over the cores.
Next on the path: `step.py`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from busllm.engine.cpu import lanes
from busllm.engine.cpu.shapes import GROUP, VECTOR

_float = np.float32
_VECTOR_BYTES = VECTOR * 4
_GROUP_BYTES = GROUP * 4
_STEPS = np.float32(255.0)
_LEAST_RANGE = np.float32(1e-36)  # the inverse of a smaller one would be infinite: such numbers count as zeros


@njit(nogil=True)
def add_row(states, branch, width):
    """states += branch; addresses of float32, `width` a multiple of 16."""
    for place in range(0, width * 4, _VECTOR_BYTES):
        lanes.store(states + place, lanes.add(lanes.load(states + place), lanes.load(branch + place)))


@njit(nogil=True, error_model="numpy")  # zeros over zero are NaN in their own row; an error would stop the others
def normalise_row(states, weights, out, size, epsilon):
    """out = states / sqrt(mean(states²) + epsilon) * weights: root mean square norm (arXiv:1910.07467).

    Args:
        states, weights, out: addresses of float32, padded with zeros to whole vectors.
        size: of the row without padding.
        epsilon: added to the mean.
    """
    squares = lanes.splat(_float(0.0))
    for place in range(0, size * 4, _VECTOR_BYTES):
        x = lanes.load(states + place)
        squares = lanes.multiply_add(x, x, squares)
    factor = lanes.splat(_float(1.0) / _float(math.sqrt(lanes.total(squares) / _float(size) + epsilon)))
    for place in range(0, size * 4, _VECTOR_BYTES):
        x = lanes.multiply(lanes.load(states + place), factor)
        lanes.store(out + place, lanes.multiply(x, lanes.load(weights + place)))


@njit(nogil=True)
def quantise_row(source, num_groups, out, scales, lows, sums):
    """Rounds a row to uint8, each group of 32 between its smallest and its largest number; zero stays zero.

    Args:
        source: address of float32.
        num_groups: groups of the row.
        out: address of uint8 (32 * num_groups,).
        scales, lows, sums: float32 (num_groups,): number = scale * integer + low; the sum of these numbers. A group
            with NaN has the scale NaN.
    """
    for group in range(num_groups):
        first, second = lanes.load(source + group * _GROUP_BYTES), lanes.load(source + group * _GROUP_BYTES + 64)
        most = max(lanes.largest(lanes.larger(first, second)), _float(0.0))
        least = min(lanes.smallest(lanes.smaller(first, second)), _float(0.0))
        inverse = _STEPS / (most - least) if most - least > _LEAST_RANGE else _float(0.0)
        zero = np.rint(-least * inverse)  # the integer that stands for zero
        by, up = lanes.splat(inverse), lanes.splat(zero)
        low, high = lanes.splat(_float(0.0)), lanes.splat(_STEPS)
        x = lanes.smaller(high, lanes.larger(low, lanes.multiply_add(first, by, up)))  # in this order NaN comes through
        y = lanes.smaller(high, lanes.larger(low, lanes.multiply_add(second, by, up)))
        to = out + group * GROUP
        p, q = lanes.store_uint8(to, x), lanes.store_uint8(to + VECTOR, y)
        total = lanes.total(lanes.add(lanes.multiply_add(x, low, p), lanes.multiply_add(y, low, q)))
        scale = (most - least) / _STEPS if most - least > _LEAST_RANGE else _float(0.0)
        scales[group] = scale + (total - total)  # one number that is none makes the row's results such
        lows[group] = -scale * zero
        sums[group] = scale * (total - _float(GROUP) * zero)


@njit(nogil=True)
def round_row(source, num_groups, out):
    """Rounds a row of 32 * num_groups to bfloat16; addresses of float32 and bfloat16."""
    for vector in range(num_groups * GROUP // VECTOR):
        lanes.store_bfloat16(out + vector * VECTOR * 2, lanes.load(source + vector * _VECTOR_BYTES))


@njit(nogil=True)
def gate_row(gated, width):
    """gate = silu(gate) * up (SwiGLU, arXiv:2002.05202).

    Args:
        gated: address of float32: `width` of the gate, which are replaced, then `width` of up.
        width: a multiple of 16.
    """
    for place in range(0, width * 4, _VECTOR_BYTES):
        gate, up = lanes.load(gated + place), lanes.load(gated + width * 4 + place)
        lanes.store(gated + place, lanes.multiply(lanes.multiply(gate, lanes.sigmoid(gate)), up))


@njit(nogil=True, error_model="numpy")
def normalise_head(head, weights, epsilon):
    """The same norm over one head, in place; float32 arrays (head_dim,) of any length.

    Eight sums side by side, so that the order is fixed and the adds need not wait for each other.
    """
    size = len(head)
    partial = np.zeros(8, np.float32)
    for first in range(0, size, 8):
        for lane in range(min(8, size - first)):
            partial[lane] += head[first + lane] * head[first + lane]
    summed = _float(0.0)
    for lane in range(8):
        summed += partial[lane]
    factor = _float(1.0) / _float(math.sqrt(summed / _float(size) + epsilon))
    for index in range(size):
        head[index] = head[index] * factor * weights[index]


@njit(nogil=True)
def rotate_head(head, cosines, sines):
    """Rotates each pair (i, i + head_dim / 2) in place (arXiv:2104.09864); float32 arrays."""
    half = len(cosines)
    for index in range(half):
        low, high = head[index], head[half + index]
        head[index] = low * cosines[index] - high * sines[index]
        head[half + index] = high * cosines[index] + low * sines[index]
