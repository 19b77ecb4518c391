"""What happens to each row on its own between the linears: norms, the activation, rotation.

Owns: these operations, each on one row. Sums are added in vectors of 16 in a fixed order.
Does not know: batches; `step.py` spreads rows over the cores.
Next on the path: `step.py`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from busllm.engine.cpu import lanes
from busllm.engine.cpu.shapes import VECTOR

_float = np.float32
_VECTOR_BYTES = VECTOR * 4


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
