"""All layers for many rows: each core takes some rows through them.

Owns: which rows a core gets, and what it does with them.
Does not know: steps of few rows (`step.py` shares the outputs of each linear instead), experts.
Next on the path: `cpu_decoder.py` takes this way where there are rows enough.

A core that keeps its rows reads nothing that another one has just written, and waits for nobody: but for the keys and
values of a sequence whose tokens several cores have, once in each layer. The price: every core reads all weights.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from busllm.engine.cpu.attention import attend_item
from busllm.engine.cpu.elementwise import add_row
from busllm.engine.cpu.inputs import prepare_row
from busllm.engine.cpu.linear import block_rows, multiply_part, read_row
from busllm.engine.cpu.rows import gate_one, normalise_one, rotate_and_store_one
from busllm.engine.cpu.shapes import Part

_LEAST_ROWS = 4  # times the cores, in each share: with fewer, all cores' reading takes longer than their products
_ROUND_ROWS = 4  # 15 rows take as long as 16, whose pieces are larger: worth a share with two rows more
_QKV, _OUTPUT, _GATE_UP, _DOWN = (int(part) for part in Part)
# How much longer a multiply-add of attention takes than one of a linear: in decode rows, which have keys and values of
# their own to read, and in prompts.
_DECODE_WEIGHT, _PROMPT_WEIGHT = 7.0, 2.0


def least_shared_rows(num_threads: int) -> int:
    """From how many rows on each of so many cores has rows of its own.

    Cores share what the memory gives, so each must have more to do for a weight the more of them read it.
    """
    return _LEAST_ROWS * num_threads**2


@njit(nogil=True, cache=True)
def share_rows(items, positions, num_shares, row_work, position_work, window):
    """Cuts a step's rows into shares of about equally much work, between the tokens of pieces of attention.

    Args:
        items: `Batch.items`.
        positions: int64 (num_tokens,).
        num_shares: how many; where there are fewer rows, some are empty.
        row_work: multiply-adds of a token in the linears of a layer.
        position_work: multiply-adds of one query head with one key and its value.
        window: how many positions a token sees at most.

    Returns:
        The items, share by share; int64 (num_shares + 1,) first items and int64 (num_shares + 1,) first rows of shares;
        whether they are independent: no sequence has rows in two of them.
    """
    num_rows = len(positions)
    work, may_begin = np.full(num_rows, row_work), np.zeros(num_rows + 1, np.bool_)
    may_begin[num_rows] = True
    sequences, counts = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)  # of rows; rows of sequences
    for item in range(len(items)):
        sequence, first, tokens = items[item, 0], items[item, 4], items[item, 5]
        may_begin[first] = True
        sequences[first : first + tokens] = sequence
    for row in range(num_rows):
        counts[sequences[row]] += 1
    for item in range(len(items)):
        sequence, heads, first, tokens = items[item, 0], items[item, 3], items[item, 4], items[item, 5]
        weight = _DECODE_WEIGHT if counts[sequence] == 1 else _PROMPT_WEIGHT
        seen = min(positions[first], window) + tokens
        work[first] += weight * position_work * heads * tokens * seen
    first_rows = _borders(work, may_begin, num_shares, row_work)
    are_independent = True
    for border in first_rows[1:-1]:
        if 0 < border < num_rows and sequences[border - 1] == sequences[border]:
            are_independent = False
    first_items, shared, place = np.zeros(num_shares + 1, np.int64), np.empty_like(items), 0
    for share in range(num_shares):
        for item in range(len(items)):
            if first_rows[share] <= items[item, 4] < first_rows[share + 1]:
                shared[place] = items[item]
                place += 1
        first_items[share + 1] = place
    return shared, first_items, first_rows, are_independent


@njit(nogil=True)
def _borders(work, may_begin, num_shares, row_work):
    """First rows of shares: where the work before them is nearest to equal shares."""
    num_rows, total = len(work), work.sum()
    first_rows = np.zeros(num_shares + 1, np.int64)
    first_rows[num_shares] = num_rows
    for share in range(1, num_shares):
        begin = first_rows[share - 1]
        before, best, least = work[:begin].sum(), begin, np.inf
        for row in range(begin, num_rows + 1):
            if may_begin[row]:
                uneven = 0.0 if (row - begin) % _ROUND_ROWS == 0 else 2.0 * row_work
                away = abs(before - total * share / num_shares) + uneven
                if away < least:
                    best, least = row, away
            if row < num_rows:
                before += work[row]
        first_rows[share] = best
    return first_rows


@njit(nogil=True, cache=True)
def hidden_states_by_rows(model, sizes, heads, batch, cache, space, first_items, first_rows, are_independent):
    """All layers over a step's tokens, without experts; the result is in space.states, before the norm.

    Args:
        model, sizes, heads, batch, cache, space: the tuples of `shapes.py`.
        first_items, first_rows, are_independent: of `share_rows`, whose items the batch has.
    """
    if are_independent:
        _run(model, sizes, heads, batch, cache, space, first_items, first_rows, -1, sizes.num_layers)
    else:
        for layer in range(-1, sizes.num_layers):
            _run(model, sizes, heads, batch, cache, space, first_items, first_rows, layer, layer + 1)


@njit(nogil=True, parallel=True)
def _run(model, sizes, heads, batch, cache, space, first_items, first_rows, first, end):
    """Layers first … end - 1, each from its attention to the next one's keys and values; before layer 0 comes -1."""
    for index in prange(len(first_rows) - 1):
        share = np.int64(index)
        for layer in range(first, end):
            for item in range(first_items[share], first_items[share + 1]):
                if layer >= 0:
                    window = model.windows[layer]
                    attend_item(
                        item, space.queries, cache.keys, cache.values, layer, batch, window, heads, space.attended
                    )
            block = block_rows(first_rows[share + 1] - first_rows[share])
            for row in range(first_rows[share], first_rows[share + 1], block):
                last = min(row + block, first_rows[share + 1])
                _some_rows(model, sizes, heads, batch, cache, space, layer, row, last)


@njit(nogil=True)
def _some_rows(model, sizes, heads, batch, cache, space, layer, first, end):
    """Rows first … end - 1 from a layer's attention to the next one's."""
    rows = np.empty(2, np.int64)
    rows[0], rows[1] = first, end
    if layer >= 0:
        _finish(model, layer, sizes, space, rows)
    else:
        for row in range(first, end):
            space.branch[row] = 0
            read_row(model.embedding, batch.token_ids[row], space.states[row])
    if layer + 1 < sizes.num_layers:
        _begin(model, layer + 1, sizes, heads, batch, cache, space, rows)
    else:
        for row in range(first, end):
            add_row(space.states[row].ctypes.data, space.branch[row].ctypes.data, space.states.shape[1])


@njit(nogil=True)
def _begin(model, layer, sizes, heads, batch, cache, space, rows):
    """Queries to `space`, keys and values to the cache."""
    linear = model.linears[layer, _QKV]
    for row in range(rows[0], rows[1]):
        normalise_one(linear, model.norms[2 * layer], sizes, space, row, rows, True)
    _multiply(linear, space, rows, space.merged)
    for row in range(rows[0], rows[1]):
        rotate_and_store_one(model, layer, sizes.norm_epsilon, heads, batch, cache, space, row)


@njit(nogil=True)
def _finish(model, layer, sizes, space, rows):
    """What follows attention."""
    output, gate_up, down = model.linears[layer, _OUTPUT], model.linears[layer, _GATE_UP], model.linears[layer, _DOWN]
    for row in range(rows[0], rows[1]):
        prepare_row(output, space, row, rows[0], rows[1], space.attended[row].ctypes.data)
    _multiply(output, space, rows, space.branch)
    for row in range(rows[0], rows[1]):
        normalise_one(gate_up, model.norms[2 * layer + 1], sizes, space, row, rows, True)
    _multiply(gate_up, space, rows, space.gated)
    for row in range(rows[0], rows[1]):
        gate_one(down, sizes.gate_size, space, row, rows)
    _multiply(down, space, rows, space.branch)


@njit(nogil=True)
def _multiply(linear, space, rows, out):
    multiply_part(linear, space.inputs, space.outliers, rows, out, 0, 1)
