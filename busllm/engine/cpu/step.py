"""A step of the compiled forward pass: some or all layers in one call that holds no GIL, and the head in another.

Owns: the order of the operations; which of them are spread over the cores.
Does not know: how one row or one product is computed (`elementwise.py`, `linear.py`, `attention.py`), Python objects.
Next on the path: back to `cpu_decoder.py`.

It computes what `engine/models/decoder.py` describes.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from busllm.engine.cpu.attention import attend
from busllm.engine.cpu.elementwise import add_row
from busllm.engine.cpu.experts import add_visits, choose_experts, send_rows
from busllm.engine.cpu.inputs import prepare_row
from busllm.engine.cpu.linear import block_rows, multiply, read_row
from busllm.engine.cpu.rows import gate_one, normalise_one, rotate_and_store_one
from busllm.engine.cpu.shapes import FEW_ROWS, Part

_QKV, _OUTPUT, _GATE_UP, _DOWN = (int(part) for part in Part)
_NUM_PARTS = len(Part)


@njit(nogil=True, cache=True)
def hidden_states(model, sizes, heads, batch, cache, space, mixture, first, end):
    """Layers first … end - 1 over a step's tokens; behind the last one the result is in space.states, before the norm.

    (The number of threads cannot be changed within: what did so could not be kept.)

    Args:
        model, sizes, heads, batch, cache, space, mixture: the tuples of `shapes.py`.
        first, end: which layers.
    """
    rows = len(batch.token_ids)
    block = block_rows(rows)
    if first == 0:
        _embed(model, batch, space)
    for layer in range(first, end):
        linears = model.linears[layer]
        for first_row in range(0, rows, block):
            some = _rows(first_row, min(first_row + block, rows))
            _normalise(linears[_QKV], model.norms[2 * layer], sizes, space, some, True)
            _note_peaks(space, _NUM_PARTS * layer + _QKV, space.normed, some)
            multiply(linears[_QKV], space, some, space.merged)
            _rotate_and_store(model, layer, sizes.norm_epsilon, heads, batch, cache, space, some)
        attend(space.queries, cache.keys, cache.values, layer, batch, model.windows[layer], heads, space.attended)
        for first_row in range(0, rows, block):
            some = _rows(first_row, min(first_row + block, rows))
            _prepare(linears[_OUTPUT], space, space.attended, some)
            _note_peaks(space, _NUM_PARTS * layer + _OUTPUT, space.attended, some)
            multiply(linears[_OUTPUT], space, some, space.branch)
            is_dense = not model.has_experts[layer]
            _normalise(linears[_GATE_UP], model.norms[2 * layer + 1], sizes, space, some, is_dense)
            _note_peaks(space, _NUM_PARTS * layer + _GATE_UP, space.normed, some)
            if is_dense:
                multiply(linears[_GATE_UP], space, some, space.gated)
                _gate(linears[_DOWN], sizes.gate_size, space, some)
                _note_peaks(space, _NUM_PARTS * layer + _DOWN, space.gated, some)
                multiply(linears[_DOWN], space, some, space.branch)
        if model.has_experts[layer]:
            _visit_experts(model.routers[layer], linears, sizes, space, mixture, rows)
            note_visits(space, _NUM_PARTS * layer + _DOWN, mixture, rows)
    if end == sizes.num_layers:
        for row in range(rows):
            add_row(space.states[row].ctypes.data, space.branch[row].ctypes.data, space.states.shape[1])


@njit(nogil=True, cache=True)
def logits(model, sizes, space, rows, out):
    """The last norm and the head over space.states[:rows]; out: float32 (rows, 16 * tiles of the head)."""
    space.branch[:rows] = 0
    every = _rows(0, rows)
    _normalise(model.head, model.norms[2 * sizes.num_layers], sizes, space, every, True)
    _note_peaks(space, _NUM_PARTS * sizes.num_layers, space.normed, every)
    multiply(model.head, space, every, out)


@njit(nogil=True)
def _rows(first, end):
    """Rows first … end - 1, as `multiply` wants those of each matrix."""
    rows = np.empty(2, np.int64)
    rows[0], rows[1] = first, end
    return rows


@njit(nogil=True)
def _embed(model, batch, space):
    space.branch[: len(batch.token_ids)] = 0
    for row in range(len(batch.token_ids)):
        read_row(model.embedding, batch.token_ids[row], space.states[row])


@njit(nogil=True)
def _note_peaks(space, linear, inputs, rows):
    """Where outliers are looked for: the largest magnitude of each input of a linear. (The first token of a text has
    large states that no other has.)
    """
    if len(space.peaks):
        for row in range(max(rows[0], 1), rows[1]):
            _note_row(space.peaks[linear], inputs[row])


@njit(nogil=True)
def note_visits(space, linear, mixture, rows):
    """The same at experts, where a row's visits stand at its `places`."""
    if len(space.peaks):
        for row in range(1, rows):
            for place in mixture.places[row]:
                _note_row(space.peaks[linear], mixture.visits.gated[place])


@njit(nogil=True)
def _note_row(peaks, inputs):
    for index in range(min(len(peaks), len(inputs))):
        peaks[index] = max(peaks[index], abs(inputs[index]))


# ---------------------------------------------------------------- norms


@njit(nogil=True)
def _normalise(linear, weights, sizes, space, rows, prepares):
    """The residual stream of the rows rows[0] … rows[1] - 1, to which the last branch is added first, normalised; and
    the linear's inputs of it, if `prepares`.
    """
    if rows[1] - rows[0] <= FEW_ROWS:
        for row in range(rows[0], rows[1]):
            normalise_one(linear, weights, sizes, space, row, rows, prepares)
    else:
        _normalise_many(linear, weights, sizes, space, rows, prepares)


@njit(nogil=True, parallel=True)
def _normalise_many(linear, weights, sizes, space, rows, prepares):
    for index in prange(rows[0], rows[1]):
        row = np.int64(index)  # as in the loop without threads, so that it is compiled once
        normalise_one(linear, weights, sizes, space, row, rows, prepares)


# ---------------------------------------------------------------- around attention


@njit(nogil=True)
def _rotate_and_store(model, layer, epsilon, heads, batch, cache, space, rows):
    """Queries to `space`, keys and values to the cache."""
    if rows[1] - rows[0] <= FEW_ROWS:
        for row in range(rows[0], rows[1]):
            rotate_and_store_one(model, layer, epsilon, heads, batch, cache, space, row)
    else:
        _rotate_and_store_many(model, layer, epsilon, heads, batch, cache, space, rows)


@njit(nogil=True, parallel=True)
def _rotate_and_store_many(model, layer, epsilon, heads, batch, cache, space, rows):
    for index in prange(rows[0], rows[1]):
        row = np.int64(index)  # as in the loop without threads, so that it is compiled once
        rotate_and_store_one(model, layer, epsilon, heads, batch, cache, space, row)


@njit(nogil=True)
def _prepare(linear, space, source, rows):
    """Input of a linear from float32 rows."""
    if rows[1] - rows[0] <= FEW_ROWS:
        for row in range(rows[0], rows[1]):
            prepare_row(linear, space, row, rows[0], rows[1], source[row].ctypes.data)
    else:
        _prepare_many(linear, space, source, rows)


@njit(nogil=True, parallel=True)
def _prepare_many(linear, space, source, rows):
    for index in prange(rows[0], rows[1]):
        row = np.int64(index)  # as in the loop without threads, so that it is compiled once
        prepare_row(linear, space, row, rows[0], rows[1], source[row].ctypes.data)


# ---------------------------------------------------------------- feed-forward


@njit(nogil=True)
def _visit_experts(router, linears, sizes, space, mixture, rows):
    """The feed-forward half of a layer that is a mixture of experts; a visit is one row at one of its experts."""
    visits = mixture.visits
    choose_experts(router, sizes.normalizes, space.normed, rows, mixture)
    send_rows(linears[_GATE_UP], space.normed, rows, mixture.places, mixture.firsts, visits)
    multiply(linears[_GATE_UP], visits, mixture.firsts, visits.gated)
    _gate(linears[_DOWN], sizes.expert_size, visits, mixture.firsts)
    multiply(linears[_DOWN], visits, mixture.firsts, visits.branch)
    add_visits(mixture, rows, space.branch)


@njit(nogil=True)
def _gate(linear, width, space, firsts):
    """The activation, and the input of the linear behind it; firsts as in `multiply`."""
    if firsts[-1] - firsts[0] <= FEW_ROWS:
        for row in range(firsts[0], firsts[-1]):
            gate_one(linear, width, space, row, firsts)
    else:
        _gate_many(linear, width, space, firsts)


@njit(nogil=True, parallel=True)
def _gate_many(linear, width, space, firsts):
    for index in prange(firsts[0], firsts[-1]):
        row = np.int64(index)  # as in the loop without threads, so that it is compiled once
        gate_one(linear, width, space, row, firsts)
