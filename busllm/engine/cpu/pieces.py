"""The cutting of a step's attention into pieces, which threads take one after the other.

Owns: how large pieces are and in which order they lie, so that equal shares of them are about equally much work.
Does not know: keys and values. It is compiled because it is done for every step, before anything else can begin.
Next on the path: `attention.py`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

MOST_ROWS = 24  # query rows of a piece: their scores, sums and a run of keys and values fit the first-level cache


@njit(nogil=True, cache=True)
def cut(cu_seqlens, positions, num_heads, num_kv_heads, num_threads):
    """Cuts rows into pieces of at most `MOST_ROWS` query rows: some tokens of one row, one KV head, and the query heads
    that share it, or a part of them.

    Args:
        cu_seqlens: int32 (num_rows + 1,); row r has the tokens cu_seqlens[r] : cu_seqlens[r + 1].
        positions: int64 (num_tokens,).
        num_heads, num_kv_heads: of the model.
        num_threads: shares that the pieces are dealt to.

    Returns:
        int64 (num_items, 6), `Batch.items`.
    """
    shared = num_heads // num_kv_heads
    heads_each = min(shared, MOST_ROWS)
    tokens_each, parts = MOST_ROWS // heads_each, -(-shared // heads_each)
    num_items = 0
    for row in range(len(cu_seqlens) - 1):
        num_items += -((cu_seqlens[row] - cu_seqlens[row + 1]) // tokens_each) * num_kv_heads * parts
    items, work = np.empty((num_items, 6), np.int64), np.empty(num_items, np.int64)
    item = 0
    for row in range(len(cu_seqlens) - 1):
        for first in range(cu_seqlens[row], cu_seqlens[row + 1], tokens_each):
            tokens = min(tokens_each, cu_seqlens[row + 1] - first)
            for kv_head in range(num_kv_heads):
                for head in range(0, shared, heads_each):
                    heads = min(heads_each, shared - head)
                    items[item] = (row, kv_head, kv_head * shared + head, heads, first, tokens)
                    work[item] = heads * tokens * (positions[first] + tokens)
                    item += 1
    return _deal(items, np.argsort(-work, kind="mergesort"), num_threads)


@njit(nogil=True)
def _deal(items, order, num_threads):
    """Each thread gets every so-manieth, the largest first; its share lies together."""
    dealt, place = np.empty_like(items), 0
    for thread in range(num_threads):
        for index in range(thread, len(order), num_threads):
            dealt[place] = items[order[index]]
            place += 1
    return dealt
