"""Products of a few query rows with 16 or more keys or value columns: the innermost loops of attention, in LLVM.

Owns: one function per number of rows and columns. Every sum runs over its pairs in order, so a query row has the same
bits whichever rows it is computed with.
Does not know: pages, masks, the softmax (`attention.py`).
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils

from busllm.engine.cpu import vectors as v
from busllm.engine.cpu.compiled import from_llvm

_ADDRESS = types.int64
_VECTOR_BYTES = 64  # 16 pairs of bfloat16, or 16 float32


def scores_product(rows: int, blocks: int) -> Any:
    """Scores of `rows` queries and `blocks` times 16 keys.

    Returns:
        A compiled function of (queries, query_stride, pairs, out, out_stride, *addresses of the key blocks, *of the
        blocks that are read next): queries are pairs of bfloat16, a key block is (pairs, 16) pairs; out float32
        (rows, 16 * blocks); strides in bytes.
    """

    @from_llvm(types.void, *[_ADDRESS] * (5 + 2 * blocks))
    def product(b: Any, queries: Any, query_stride: Any, pairs: Any, out: Any, out_stride: Any, *keys: Any) -> None:
        totals = _zeros(b, rows * blocks)
        with cgutils.for_range(b, pairs, intp=v.INT64) as loop:
            place = b.mul(loop.index, v.constant(_VECTOR_BYTES))
            for block in keys[blocks:]:
                v.fetch(b, v.at(b, block, place))
            loaded = [v.load(b, v.at(b, block, place), v.INTS, 64) for block in keys[:blocks]]
            for row in range(rows):
                query = _pair_of(b, queries, query_stride, row, loop.index)
                for column, key in enumerate(loaded):
                    total = totals[row * blocks + column]
                    b.store(v.dot_pairs(b, b.load(total), key, query), total)
        _store(b, totals, out, out_stride, rows)

    return product


def values_product(rows: int, columns: int, blocks: int) -> Any:
    """Adds the weighted values of `blocks` times 16 tokens to `columns` times 16 dimensions of `rows` sums.

    Returns:
        A compiled function of (weights, weight_stride, value_stride, out, out_stride, *addresses of the value blocks,
        *of the blocks that are read next): weights are pairs of bfloat16, a value block is (8, padded head_dim) pairs;
        strides in bytes.
    """

    @from_llvm(types.void, *[_ADDRESS] * (5 + 2 * blocks))
    def product(
        b: Any, weights: Any, weight_stride: Any, value_stride: Any, out: Any, out_stride: Any, *values: Any
    ) -> None:
        totals = _zeros(b, rows * columns)
        for row in range(rows):
            for column in range(columns):
                place = b.add(b.mul(out_stride, v.constant(row)), v.constant(column * _VECTOR_BYTES))
                b.store(v.load(b, v.at(b, out, place), v.FLOATS), totals[row * columns + column])
        for index, (block, ahead) in enumerate(zip(values[:blocks], values[blocks:], strict=True)):
            with cgutils.for_range(b, v.constant(8), intp=v.INT64) as loop:
                place = b.mul(loop.index, value_stride)
                line = v.at(b, block, place)
                for column in range(columns):
                    v.fetch(b, v.at(b, v.at(b, ahead, place), column * _VECTOR_BYTES))
                loaded = [v.load(b, v.at(b, line, column * _VECTOR_BYTES), v.INTS, 64) for column in range(columns)]
                pair = b.add(loop.index, v.constant(8 * index))
                for row in range(rows):
                    weight = _pair_of(b, weights, weight_stride, row, pair)
                    for column, value in enumerate(loaded):
                        total = totals[row * columns + column]
                        b.store(v.dot_pairs(b, b.load(total), value, weight), total)
        _store(b, totals, out, out_stride, rows)

    return product


def _zeros(b: Any, count: int) -> list[Any]:
    totals = [cgutils.alloca_once(b, v.FLOATS) for _ in range(count)]
    for total in totals:
        b.store(v.all_lanes(v.FLOATS, 0.0), total)
    return totals


def _pair_of(b: Any, table: Any, stride: Any, row: int, index: Any) -> Any:
    """Pair `index` of a row, in all lanes."""
    place = b.add(b.mul(stride, v.constant(row)), b.mul(index, v.constant(4)))
    return v.splat(b, v.load(b, v.at(b, table, place), v.INT32))


def _store(b: Any, totals: list[Any], out: Any, out_stride: Any, rows: int) -> None:
    columns = len(totals) // rows
    for index, total in enumerate(totals):
        row, column = divmod(index, columns)
        place = b.add(b.mul(out_stride, v.constant(row)), v.constant(column * _VECTOR_BYTES))
        v.store(b, b.load(total), v.at(b, out, place))
