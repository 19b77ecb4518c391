"""One row between two linears, in the working memory of a step.

Owns: what is read and written there: norm and the next linear's inputs, rotation and the cache, the activation.
Does not know: which core does which rows (`step.py`, `row_shares.py`), the arithmetic (`elementwise.py`, `inputs.py`).
Next on the path: `step.py`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from busllm.engine.cpu.elementwise import add_row, gate_row, normalise_head, normalise_row, rotate_head
from busllm.engine.cpu.inputs import prepare_row, rows_beside
from busllm.engine.cpu.lanes import bfloat16_bits
from busllm.engine.cpu.runs import BLOCK


@njit(nogil=True)
def normalise_one(linear, weights, sizes, space, row, rows, prepares):
    """Adds the last branch to the residual stream and normalises it: the inputs of a linear.

    Args:
        linear: int64, by `Field`, what follows.
        weights: float32 (padded hidden_size,), of the norm.
        sizes, space: Sizes, Workspace.
        row, rows: which; the matrix has the rows rows[0] … rows[1] - 1.
        prepares: False where experts follow, which take `space.normed`.
    """
    states, normed = space.states[row].ctypes.data, space.normed[row].ctypes.data
    add_row(states, space.branch[row].ctypes.data, space.states.shape[1])
    normalise_row(states, weights.ctypes.data, normed, sizes.hidden_size, sizes.norm_epsilon)
    if prepares:
        prepare_row(linear, space, row, rows[0], rows[1], normed)


@njit(nogil=True)
def rotate_and_store_one(model, layer, epsilon, heads, batch, cache, space, row):
    """From `space.merged`: queries to `space.queries`, keys and values to the cache, all in bfloat16.

    Args:
        model, heads, batch, cache, space: the tuples of `shapes.py`.
        layer, row: which.
        epsilon: of the norms of heads, if there are any.
    """
    position, dim = batch.positions[row], heads.head_dim
    cosines, sines = model.cosines[position], model.sines[position]
    scale = np.float32(heads.scale)
    num_rotated = heads.num_heads + heads.num_kv_heads
    for head in range(num_rotated):
        states = space.merged[row, head * dim : (head + 1) * dim]
        is_key = head >= heads.num_heads
        if len(model.head_norms):
            normalise_head(states, model.head_norms[layer, int(is_key)], epsilon)
        rotate_head(states, cosines, sines)
        if not is_key:
            queries = space.queries[row, head * dim : (head + 1) * dim]
            for index in range(dim):
                queries[index] = bfloat16_bits(states[index] * scale)
    slot = batch.cache_slots[row]
    page, offset = slot // heads.page_tokens, slot % heads.page_tokens
    block, token = offset // BLOCK, offset % BLOCK
    for head in range(heads.num_kv_heads):
        start = (heads.num_heads + head) * dim
        keys = cache.keys[page, layer, head, block]  # (head_dim / 2, 16, 2)
        values = cache.values[page, layer, head, block, token // 2]  # (padded head_dim, 2)
        for index in range(dim):
            keys[index // 2, token, index % 2] = bfloat16_bits(space.merged[row, start + index])
            values[index, token % 2] = bfloat16_bits(space.merged[row, start + heads.num_kv_heads * dim + index])


@njit(nogil=True)
def gate_one(linear, width, space, row, firsts):
    """The activation, and the inputs of the linear behind it.

    Args:
        linear: int64, by `Field`.
        width: padded width of the gate.
        space: Workspace.
        row, firsts: which; firsts as in `multiply`.
    """
    gated = space.gated[row].ctypes.data
    gate_row(gated, width)
    first, end = rows_beside(row, firsts)
    prepare_row(linear, space, row, first, end, gated)
