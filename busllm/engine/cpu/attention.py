"""Causal attention of ragged rows over paged keys and values, compiled.

Owns: the order of the work on one piece, and the softmax.
Does not know: the model around it; the innermost loops are in `page_products.py`, the pieces are cut by
`cpu_attention.py`.
Next on the path: `step.py`.

A piece is up to `MOST_ROWS` query rows of one sequence and one KV head: the query heads that share it, of consecutive
tokens. Its keys are read in runs of 64 positions, counted from the sequence's first, with a running maximum and sum
(the online softmax of arXiv:2205.14135). A run that a query does not see changes nothing in its sums, to the bit. So a
query has the same bits in a prompt chunk and in a decode step, alone and beside others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from busllm.engine.cpu import lanes
from busllm.engine.cpu.page_products import scores_product, values_product
from busllm.engine.cpu.shapes import VECTOR
from busllm.engine.cpu.vectors import INSTRUCTIONS

MOST_ROWS = 24  # query rows of a piece: their scores, sums and a run of keys and values fit the first-level cache
BLOCK = 16  # tokens whose keys are stored together
RUN = 64  # keys per step of the softmax
_BLOCKS = RUN // BLOCK
_float = np.float32
_LOWEST = np.float32(-1e30)

# Rows and columns whose sums stay in registers: 32 of 512 bits, 16 of 256, 32 of 128.
_IS_WIDE = INSTRUCTIONS.vector_bits == 512
_ROWS = (6, 3, 1) if _IS_WIDE else (3, 2, 1)
_COLUMNS = 4 if _IS_WIDE else 1


def _score_rows(rows: int) -> Any:
    """Scores of so many rows and one run's keys."""
    product = scores_product(rows, _COLUMNS)

    @njit(nogil=True)
    def all_at_once(queries, stride, pairs, out, keys):
        product(queries, stride, pairs, out, RUN * 4, keys[0], keys[1], keys[2], keys[3])

    @njit(nogil=True)
    def one_by_one(queries, stride, pairs, out, keys):
        for block in range(_BLOCKS):
            product(queries, stride, pairs, out + block * VECTOR * 4, RUN * 4, keys[block])

    return all_at_once if _COLUMNS == _BLOCKS else one_by_one


def _add_rows(rows: int) -> Any:
    """Adds one run's weighted values to so many rows."""
    wide, narrow = values_product(rows, _COLUMNS, _BLOCKS), values_product(rows, 1, _BLOCKS)

    @njit(nogil=True)
    def add(weights, width, out, values):
        v0, v1, v2, v3 = values[0], values[1], values[2], values[3]
        column, bytes_each = 0, width * 4
        while column < width:
            o, c = out + column * 4, column * 4
            if column + _COLUMNS * VECTOR <= width:
                wide(weights, RUN * 2, bytes_each, o, bytes_each, v0 + c, v1 + c, v2 + c, v3 + c)
                column += _COLUMNS * VECTOR
            else:
                narrow(weights, RUN * 2, bytes_each, o, bytes_each, v0 + c, v1 + c, v2 + c, v3 + c)
                column += VECTOR

    return add


_score_most, _score_some, _score_one = (_score_rows(rows) for rows in _ROWS)
_add_most, _add_some, _add_one = (_add_rows(rows) for rows in _ROWS)
_MOST, _SOME, _ = _ROWS


@njit(nogil=True, parallel=True)
def attend(queries, keys, values, batch, window, heads, out):
    """One layer's attention.

    Args:
        queries: uint16 (num_tokens, num_heads * head_dim), bfloat16, scaled.
        keys, values: one layer of `Cache`.
        batch: Batch.
        window: how many positions a token sees.
        heads: Heads.
        out: float32 (num_tokens, at least num_heads * head_dim).
    """
    for item in prange(len(batch.items)):
        _attend_item(np.int64(item), queries, keys, values, batch, window, heads, out)


@njit(nogil=True)
def _attend_item(item, queries, keys, values, batch, window, heads, out):
    """Gathers one piece's queries, attends, scatters the result."""
    sequence, kv_head, first_head, num_heads, first_token, num_tokens = batch.items[item]
    dim, rows = heads.head_dim, num_heads * num_tokens
    gathered = np.empty((rows, dim), np.uint16)
    for row in range(rows):
        place = (first_head + row % num_heads) * dim
        gathered[row] = queries[first_token + row // num_heads, place : place + dim]
    weighted = np.zeros((rows, heads.padded_head_dim), np.float32)
    where = (
        keys[0, kv_head].ctypes.data,
        values[0, kv_head].ctypes.data,
        keys[0].nbytes,
        values[0].nbytes,
        heads.page_tokens // BLOCK,
    )
    pages = batch.pages[batch.page_starts[sequence] : batch.page_starts[sequence + 1]]
    _attend_rows(gathered, batch.positions[first_token], num_heads, window, where, pages, weighted)
    for row in range(rows):
        place = (first_head + row % num_heads) * dim
        out[first_token + row // num_heads, place : place + dim] = weighted[row, :dim]


@njit(nogil=True)
def _attend_rows(queries, first_position, num_heads, window, where, pages, weighted):
    """The sums of a piece; row r of `queries` is at position first_position + r // num_heads."""
    rows, dim = queries.shape
    stride = dim * 2
    scores, weights = np.empty((rows, RUN), np.float32), np.empty((rows, RUN), np.uint16)
    most, summed = np.full(rows, _LOWEST, np.float32), np.zeros(rows, np.float32)
    width = weighted.shape[1]
    last_position = first_position + (rows - 1) // num_heads
    blocks = np.empty((2, _BLOCKS), np.int64)
    for run in range(max(0, first_position - window + 1) // RUN, last_position // RUN + 1):
        # Rows whose position lies before the run see nothing of it, nor of any later one.
        skipped = max(0, run * RUN - first_position) * num_heads
        _find_blocks(run, where, pages, width, dim, blocks)
        _score(queries.ctypes.data + skipped * stride, stride, dim // 2, scores[skipped:], blocks[0])
        for row in range(skipped, rows):
            high = first_position + row // num_heads + 1 - run * RUN
            limits = (np.int32(max(high - window, 0)), np.int32(min(high, RUN)))
            _weigh(scores[row].ctypes.data, weights[row].ctypes.data, limits, most, summed, row, weighted[row])
        _add_values(weights[skipped:], weighted[skipped:], blocks[1])
    for row in range(rows):
        _scale(weighted[row], lanes.splat(_float(1.0) / summed[row]))


@njit(nogil=True)
def _find_blocks(run, where, pages, width, dim, blocks):
    """Addresses of a run's keys and values; beyond the last page the first stands in, where everything is masked."""
    keys, values, key_page_bytes, value_page_bytes, per_page = where
    for index in range(_BLOCKS):
        block = run * _BLOCKS + index
        if block >= len(pages) * per_page:
            block = 0
        page, within = np.int64(pages[block // per_page]), block % per_page
        blocks[0, index] = keys + page * key_page_bytes + within * (BLOCK * dim * 2)
        blocks[1, index] = values + page * value_page_bytes + within * (BLOCK * width * 2)


@njit(nogil=True)
def _weigh(scores, weights, limits, most, summed, row, weighted):
    """Turns a run of one row's scores into weights, and shrinks its sums where the maximum grows."""
    low, high = limits
    s0 = lanes.keep_between(lanes.load(scores), low, high)
    s1 = lanes.keep_between(lanes.load(scores + 64), low - np.int32(16), high - np.int32(16))
    s2 = lanes.keep_between(lanes.load(scores + 128), low - np.int32(32), high - np.int32(32))
    s3 = lanes.keep_between(lanes.load(scores + 192), low - np.int32(48), high - np.int32(48))
    top = lanes.largest(lanes.larger(lanes.larger(s0, s1), lanes.larger(s2, s3)))
    if top > most[row]:
        shrink = lanes.exponential(lanes.splat(most[row] - top))
        most[row] = top
        summed[row] *= lanes.largest(shrink)
        _scale(weighted, shrink)
    largest = lanes.splat(most[row])
    e0 = lanes.store_bfloat16(weights, lanes.exponential(lanes.subtract(s0, largest)))
    e1 = lanes.store_bfloat16(weights + 32, lanes.exponential(lanes.subtract(s1, largest)))
    e2 = lanes.store_bfloat16(weights + 64, lanes.exponential(lanes.subtract(s2, largest)))
    e3 = lanes.store_bfloat16(weights + 96, lanes.exponential(lanes.subtract(s3, largest)))
    # The rounded weights are summed, so that they add up to 1.
    summed[row] += lanes.total(lanes.add(lanes.add(e0, e1), lanes.add(e2, e3)))


@njit(nogil=True)
def _scale(row, factor):
    address = row.ctypes.data
    for place in range(0, len(row) * 4, VECTOR * 4):
        lanes.store(address + place, lanes.multiply(lanes.load(address + place), factor))


@njit(nogil=True)
def _score(queries, stride, pairs, scores, keys):
    """Scores of all rows and one run's keys."""
    rows, row = len(scores), 0
    while row < rows:
        x, o = queries + row * stride, scores.ctypes.data + row * RUN * 4
        if row + _MOST <= rows:
            _score_most(x, stride, pairs, o, keys)
            row += _MOST
        elif row + _SOME <= rows:
            _score_some(x, stride, pairs, o, keys)
            row += _SOME
        else:
            _score_one(x, stride, pairs, o, keys)
            row += 1


@njit(nogil=True)
def _add_values(weights, weighted, values):
    """Adds one run's weighted values to all rows."""
    rows, row, width = len(weights), 0, weighted.shape[1]
    while row < rows:
        w, o = weights.ctypes.data + row * RUN * 2, weighted.ctypes.data + row * width * 4
        if row + _MOST <= rows:
            _add_most(w, width, o, values)
            row += _MOST
        elif row + _SOME <= rows:
            _add_some(w, width, o, values)
            row += _SOME
        else:
            _add_one(w, width, o, values)
            row += 1
