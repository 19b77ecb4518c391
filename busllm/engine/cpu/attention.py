"""Causal attention of ragged rows over paged keys and values, compiled.

Owns: the order of the work on one piece, and the softmax.
Does not know: the model around it; the innermost loops are in `page_products.py`, the pieces are cut by
`pieces.py`.
Next on the path: `step.py`.

A piece (`pieces.py`) is some query rows of one sequence and one KV head: the query heads that share it, of consecutive
tokens. Its keys are read in runs of 64 positions, counted from the sequence's first, with a running maximum and sum
(the online softmax of arXiv:2205.14135). A run that a query does not see changes nothing in its sums, to the bit. So a
query has the same bits in a prompt chunk and in a decode step, alone and beside others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from busllm.engine.cpu import lanes
from busllm.engine.cpu.page_products import scores_product, values_product
from busllm.engine.cpu.runs import BLOCKS_PER_RUN, RUN, find_pages, find_run, first_run
from busllm.engine.cpu.shapes import VECTOR
from busllm.engine.cpu.vectors import INSTRUCTIONS

_float = np.float32
_LOWEST = np.float32(-1e30)

# Rows and columns whose sums stay in registers: 32 of 512 bits, 16 of 256, 32 of 128.
_IS_WIDE = INSTRUCTIONS.vector_bits == 512
_ROWS = (6, 3, 1) if _IS_WIDE else (3, 2, 1)
_COLUMNS = 4 if _IS_WIDE else 1


class _Piece(NamedTuple):
    """One piece: addresses of its memory, and sizes.

    Attributes:
        queries: bfloat16 (rows, head_dim); row r is at position first_position + r // num_heads.
        scores: float32 (rows, 64). weights: bfloat16 (rows, 64).
        sums: float32 (rows, padded head_dim), zero at first, then the result.
    """

    queries: int
    scores: int
    weights: int
    sums: int
    rows: int
    num_heads: int
    first_position: int
    window: int


def _score_rows(rows: int) -> Any:
    """Scores of so many rows and one run's keys."""
    product = scores_product(rows, _COLUMNS)

    @njit(nogil=True)
    def all_at_once(queries, stride, pairs, out, keys, ahead):
        k, a = keys, ahead
        product(queries, stride, pairs, out, RUN * 4, k[0], k[1], k[2], k[3], a[0], a[1], a[2], a[3])

    @njit(nogil=True)
    def one_by_one(queries, stride, pairs, out, keys, ahead):
        for block in range(BLOCKS_PER_RUN):
            product(queries, stride, pairs, out + block * VECTOR * 4, RUN * 4, keys[block], ahead[block])

    return all_at_once if _COLUMNS == BLOCKS_PER_RUN else one_by_one


def _add_rows(rows: int) -> Any:
    """Adds one run's weighted values to so many rows."""
    wide, narrow = values_product(rows, _COLUMNS, BLOCKS_PER_RUN), values_product(rows, 1, BLOCKS_PER_RUN)

    @njit(nogil=True)
    def add(weights, width, out, values, ahead):
        (v0, v1, v2, v3), (a0, a1, a2, a3) = values, ahead
        column, each = 0, width * 4
        while column < width:
            o, c = out + column * 4, column * 4
            b0, b1, b2, b3 = a0 + c, a1 + c, a2 + c, a3 + c
            if column + _COLUMNS * VECTOR <= width:
                wide(weights, RUN * 2, each, o, each, v0 + c, v1 + c, v2 + c, v3 + c, b0, b1, b2, b3)
                column += _COLUMNS * VECTOR
            else:
                narrow(weights, RUN * 2, each, o, each, v0 + c, v1 + c, v2 + c, v3 + c, b0, b1, b2, b3)
                column += VECTOR

    return add


_score_most, _score_some, _score_one = (_score_rows(rows) for rows in _ROWS)
_add_most, _add_some, _add_one = (_add_rows(rows) for rows in _ROWS)
_MOST, _SOME, _ = _ROWS


@njit(nogil=True, parallel=True)
def attend(queries, keys, values, layer, batch, window, heads, out):
    """One layer's attention.

    Args:
        queries: uint16 (num_tokens, num_heads * head_dim), bfloat16, scaled.
        keys, values: of `Cache`.
        layer: which.
        batch: Batch.
        window: how many positions a token sees.
        heads: Heads.
        out: float32 (num_tokens, at least num_heads * head_dim).
    """
    for item in prange(len(batch.items)):
        attend_item(np.int64(item), queries, keys, values, layer, batch, window, heads, out)


@njit(nogil=True)
def attend_item(item, queries, keys, values, layer, batch, window, heads, out):
    """The attention of one piece, `batch.items[item]`; the other arguments are those of `attend`.

    Memory is made here: it must outlive all use of its address, so the work is another function.
    """
    _, _, _, num_heads, first_token, num_tokens = batch.items[item]
    rows = num_heads * num_tokens
    scratch = np.empty(rows * (heads.head_dim // 2 + RUN + RUN // 2 + heads.padded_head_dim), np.float32)
    states = np.empty((2, rows), np.float32)
    place = (batch.positions[first_token], window)
    found = find_pages(item, keys, values, layer, batch, heads)
    ahead = _first_blocks(min(item + 1, len(batch.items) - 1), keys, values, layer, batch, window, heads)
    _attend_in(scratch, states, batch.items[item], place, queries, found, ahead, heads, out)


@njit(nogil=True)
def _first_blocks(item, keys, values, layer, batch, window, heads):
    """Where a piece begins to read."""
    where, pages = find_pages(item, keys, values, layer, batch, heads)
    run = first_run(batch.positions[batch.items[item, 4]], window)
    return find_run(run, where, pages, heads.padded_head_dim, heads.head_dim)


@njit(nogil=True)
def _attend_in(scratch, states, item, place, queries, found, ahead, heads, out):
    """Gathers a piece's queries, attends, scatters the result."""
    _, _, first_head, num_heads, first_token, num_tokens = item
    dim, width, rows = heads.head_dim, heads.padded_head_dim, num_heads * num_tokens
    gathered = scratch.ctypes.data
    scores = gathered + rows * dim * 2
    weights = scores + rows * RUN * 4
    sums = weights + rows * RUN * 2
    query_row = queries.ctypes.data + first_token * queries.shape[1] * 2 + first_head * dim * 2
    out_row = out.ctypes.data + first_token * out.shape[1] * 4 + first_head * dim * 4
    # The heads of one token lie together, so a decode row needs no copies.
    is_token, is_direct = num_tokens == 1, num_tokens == 1 and width == dim
    if not is_token:
        for row in range(rows):
            source = query_row + row // num_heads * queries.shape[1] * 2 + row % num_heads * dim * 2
            lanes.copy(gathered + row * dim * 2, source, dim * 2)
    piece = _Piece(
        query_row if is_token else gathered,
        scores,
        weights,
        out_row if is_direct else sums,
        rows,
        num_heads,
        place[0],
        place[1],
    )
    _attend_piece(piece, found, ahead, dim, width, states)
    if not is_direct:
        for row in range(rows):
            to = out_row + row // num_heads * out.shape[1] * 4 + row % num_heads * dim * 4
            lanes.copy(to, sums + row * width * 4, dim * 4)


@njit(nogil=True, error_model="numpy")  # a sum of zero gives NaN in its own row; an error would stop the others
def _attend_piece(piece, found, ahead, dim, width, states):
    """The sums of a piece.

    While a run is computed the next one is fetched from memory, at last the first one of the next piece (`ahead`):
    pages lie scattered, and the CPU cannot guess where. states: float32 (2, rows), working memory.
    """
    where, pages = found
    rows, stride, first = piece.rows, dim * 2, piece.first_position
    _set(piece.sums, rows * width)
    states[0], states[1] = _LOWEST, 0
    last_run = (first + (rows - 1) // piece.num_heads) // RUN
    begin = first_run(first, piece.window)
    keys, values = find_run(begin, where, pages, width, dim)
    for run in range(begin, last_run + 1):
        # Rows whose position lies before the run see nothing of it, nor of any later one.
        skipped = max(0, run * RUN - first) * piece.num_heads
        next_keys, next_values = find_run(run + 1, where, pages, width, dim) if run < last_run else ahead
        scores, weights = piece.scores + skipped * RUN * 4, piece.weights + skipped * RUN * 2
        _score(piece.queries + skipped * stride, stride, scores, rows - skipped, keys, next_keys)
        for row in range(skipped, rows):
            high = first + row // piece.num_heads + 1 - run * RUN
            limits = (np.int32(max(high - piece.window, 0)), np.int32(min(high, RUN)))
            at, to = piece.scores + row * RUN * 4, piece.weights + row * RUN * 2
            _weigh(at, to, limits, states, row, piece.sums + row * width * 4, width)
        _add_values(weights, piece.sums + skipped * width * 4, width, rows - skipped, values, next_values)
        keys, values = next_keys, next_values
    for row in range(rows):
        _scale(piece.sums + row * width * 4, width, lanes.splat(_float(1.0) / states[1, row]))


@njit(nogil=True)
def _weigh(scores, weights, limits, states, row, sums, width):
    """Turns a run of one row's scores into weights, and shrinks its sums where the maximum grows."""
    low, high = limits
    s0 = lanes.keep_between(lanes.load(scores), low, high)
    s1 = lanes.keep_between(lanes.load(scores + 64), low - np.int32(16), high - np.int32(16))
    s2 = lanes.keep_between(lanes.load(scores + 128), low - np.int32(32), high - np.int32(32))
    s3 = lanes.keep_between(lanes.load(scores + 192), low - np.int32(48), high - np.int32(48))
    top = lanes.largest(lanes.larger(lanes.larger(s0, s1), lanes.larger(s2, s3)))
    if top > states[0, row]:
        shrink = lanes.exponential(lanes.splat(states[0, row] - top))
        states[0, row] = top
        states[1, row] *= lanes.largest(shrink)
        _scale(sums, width, shrink)
    largest = lanes.splat(states[0, row])
    e0 = lanes.store_bfloat16(weights, lanes.exponential(lanes.subtract(s0, largest)))
    e1 = lanes.store_bfloat16(weights + 32, lanes.exponential(lanes.subtract(s1, largest)))
    e2 = lanes.store_bfloat16(weights + 64, lanes.exponential(lanes.subtract(s2, largest)))
    e3 = lanes.store_bfloat16(weights + 96, lanes.exponential(lanes.subtract(s3, largest)))
    # The rounded weights are summed, so that they add up to 1.
    states[1, row] += lanes.total(lanes.add(lanes.add(e0, e1), lanes.add(e2, e3)))


@njit(nogil=True)
def _scale(row, width, factor):
    for place in range(row, row + width * 4, VECTOR * 4):
        lanes.store(place, lanes.multiply(lanes.load(place), factor))


@njit(nogil=True)
def _set(first, count):
    """Zeros; `count` is a multiple of 16."""
    zero = lanes.splat(_float(0.0))
    for place in range(first, first + count * 4, VECTOR * 4):
        lanes.store(place, zero)


@njit(nogil=True)
def _score(queries, stride, scores, rows, keys, ahead):
    """Scores of all rows and one run's keys."""
    row, pairs = 0, stride // 4
    while row < rows:
        x, o = queries + row * stride, scores + row * RUN * 4
        if row + _MOST <= rows:
            _score_most(x, stride, pairs, o, keys, ahead)
            row += _MOST
        elif row + _SOME <= rows:
            _score_some(x, stride, pairs, o, keys, ahead)
            row += _SOME
        else:
            _score_one(x, stride, pairs, o, keys, ahead)
            row += 1


@njit(nogil=True)
def _add_values(weights, sums, width, rows, values, ahead):
    """Adds one run's weighted values to all rows."""
    row = 0
    while row < rows:
        w, o = weights + row * RUN * 2, sums + row * width * 4
        if row + _MOST <= rows:
            _add_most(w, width, o, values, ahead)
            row += _MOST
        elif row + _SOME <= rows:
            _add_some(w, width, o, values, ahead)
            row += _SOME
        else:
            _add_one(w, width, o, values, ahead)
            row += 1
