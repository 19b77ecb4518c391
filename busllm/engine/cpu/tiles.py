"""Products of a few rows with 16 columns' worth of weights: the innermost loops, written in LLVM.

Owns: one function per number format and number of rows. A sum is added up in the same order at every number of rows,
so a row has the same bits alone and in any batch.
Does not know: matrices (`linear.py` walks over tiles and rows), sequences.

Quantised weights are multiplied by states that are integers with a scale per group of 32: two int16 or four uint8 per
32-bit lane, products and the sum of a group in int32, which is exact.

Weights lie by tile of 16 outputs and within it by group of 32 inputs (bfloat16: by pair of inputs); see `pack.py`:
    int4      4 vectors of 64 bytes: of the 8 nibbles that lane n of vector j has, nibble k and nibble k + 4 are inputs
              2p and 2p + 1 of output n, with p = 4j + k; then 16 scales and 16 minimums in float16
    int8      8 vectors of 64 bytes: lane n of vector j has the inputs 4j, 4j + 2, 4j + 1, 4j + 3 of output n; then 16
              scales in float32
    bfloat16  16 vectors of 16 pairs
"""

from __future__ import annotations

from typing import Any, NamedTuple

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils

from busllm.engine.cpu import vectors as v
from busllm.engine.cpu.compiled import from_llvm

GROUP = 32  # inputs that share a scale
INT4_GROUP_BYTES = 4 * 64 + 2 * 32
INT8_GROUP_BYTES = 8 * 64 + 64
BFLOAT16_PAIR_BYTES = 64
BFLOAT16_GROUP_BYTES = GROUP // 2 * BFLOAT16_PAIR_BYTES

_ADDRESS = types.int64
_ALL_SHORTS = ir.VectorType(v.INT16, 32)


class _Tile(NamedTuple):
    """Arguments of a tile, as LLVM values.

    Attributes:
        weights, bias, states, out: addresses of one tile's weights, 16 float32, the first row's inputs and results.
        states_stride, out_stride: bytes from row to row.
        scales, lows, sums: addresses of float32 (rows, num_groups), see `Workspace`; unused where the format has none.
        num_groups: int64.
    """

    weights: Any
    bias: Any
    states: Any
    states_stride: Any
    scales: Any
    lows: Any
    sums: Any
    num_groups: Any
    out: Any
    out_stride: Any


@from_llvm(types.int32, _ADDRESS)
def byte_at(b, address):
    """A signed byte."""
    return b.sext(v.load(b, address, v.INT8, 1), v.INT32)


@from_llvm(types.float32, _ADDRESS)
def half_at(b, address):
    """A float16 as float32."""
    return b.fpext(v.load(b, address, v.HALF, 2), v.FLOAT)


@from_llvm(types.float32, _ADDRESS)
def float_at(b, address):
    """A float32."""
    return v.load(b, address, v.FLOAT)


@from_llvm(types.float32, _ADDRESS)
def bfloat16_at(b, address):
    """A bfloat16 as float32."""
    bits = b.zext(v.load(b, address, v.INT16, 2), v.INT32)
    return b.bitcast(b.shl(bits, ir.Constant(v.INT32, 16)), v.FLOAT)


def int4_tile(rows: int) -> Any:
    """y = bias + Σ over groups of scale · s · Σ q · x + minimum · s · Σ x, with x in int16 and its scale s.

    Returns:
        A compiled function with the arguments of `_Tile`.
    """
    nibbles = v.all_lanes(v.INTS, 0x000F000F)

    def group(b: Any, tile: _Tile, index: Any, totals: list[Any]) -> None:
        packed, scale, minimum = _int4_group(b, tile, index)
        weights = [b.and_(b.lshr(x, v.all_lanes(v.INTS, 4 * k)), nibbles) for x in packed for k in range(4)]
        for row, total in enumerate(totals):
            dot = _dot_group(b, tile, index, row, weights)
            own, summed = (_splat_at(b, table, tile, index, row) for table in (tile.scales, tile.sums))
            y = v.fma(b, dot, b.fmul(scale, own), b.load(total))
            b.store(v.fma(b, minimum, summed, y), total)

    return _tile(rows, group, INT4_GROUP_BYTES)


def int4_byte_tile(rows: int) -> Any:
    """y = bias + Σ over groups of scale · (s · Σ q · x + low · Σ q) + minimum · Σ (s · x + low), with x in uint8.

    Half the products of `int4_tile`: an instruction takes four of them per lane instead of two.

    Returns:
        A compiled function with the arguments of `_Tile`.
    """
    nibbles, four = v.all_lanes(v.INTS, 0x0F0F0F0F), v.all_lanes(v.INTS, 4)
    ones, zeros = v.all_lanes(v.INTS, 0x01010101), v.all_lanes(v.INTS, 0)

    def group(b: Any, tile: _Tile, index: Any, totals: list[Any]) -> None:
        packed, scale, minimum = _int4_group(b, tile, index)
        weights = [half for x in packed for half in (b.and_(x, nibbles), b.and_(b.lshr(x, four), nibbles))]
        summed = zeros
        for quads in weights:
            summed = v.dot_bytes(b, summed, ones, quads)
        shift = b.fmul(scale, b.sitofp(summed, v.FLOATS))
        first = b.mul(index, v.constant(GROUP))
        for row, total in enumerate(totals):
            dot = zeros
            for quad, quads in enumerate(weights):
                states = v.splat(b, v.load(b, _in_row(b, tile, row, b.add(first, v.constant(4 * quad))), v.INT32))
                dot = v.dot_bytes(b, dot, states, quads)
            tables = (tile.scales, tile.lows, tile.sums)
            own, low, all_states = (_splat_at(b, table, tile, index, row) for table in tables)
            y = v.fma(b, b.sitofp(dot, v.FLOATS), b.fmul(scale, own), b.load(total))
            y = v.fma(b, shift, low, y)
            b.store(v.fma(b, minimum, all_states, y), total)

    return _tile(rows, group, INT4_GROUP_BYTES)


def int8_tile(rows: int) -> Any:
    """y = bias + Σ over groups of scale · s · Σ q · x; x in int16, arguments of `_Tile`."""
    eight = ir.Constant(_ALL_SHORTS, [8] * 32)

    def group(b: Any, tile: _Tile, index: Any, totals: list[Any]) -> None:
        block = v.at(b, tile.weights, b.mul(index, v.constant(INT8_GROUP_BYTES)))
        weights = []
        for j in range(8):
            quads = b.bitcast(v.load(b, v.at(b, block, 64 * j), v.INTS, 64), _ALL_SHORTS)
            by_parity = (b.ashr(b.shl(quads, eight), eight), b.ashr(quads, eight))
            weights += [b.bitcast(pairs, v.INTS) for pairs in by_parity]
        scale = v.load(b, v.at(b, block, 512), v.FLOATS, 64)
        for row, total in enumerate(totals):
            dot = _dot_group(b, tile, index, row, weights)
            own = _splat_at(b, tile.scales, tile, index, row)
            b.store(v.fma(b, dot, b.fmul(scale, own), b.load(total)), total)

    return _tile(rows, group, INT8_GROUP_BYTES)


def bfloat16_tile(rows: int) -> Any:
    """y = bias + Σ over pairs of inputs, both in bfloat16; arguments of `_Tile`."""

    def group(b: Any, tile: _Tile, index: Any, totals: list[Any]) -> None:
        block = v.at(b, tile.weights, b.mul(index, v.constant(BFLOAT16_GROUP_BYTES)))
        for pair in range(GROUP // 2):
            weights = v.load(b, v.at(b, block, BFLOAT16_PAIR_BYTES * pair), v.INTS, 64)
            for row, total in enumerate(totals):
                place = b.add(b.mul(index, v.constant(2 * GROUP)), v.constant(4 * pair))
                states = v.splat(b, v.load(b, _in_row(b, tile, row, place), v.INT32))
                b.store(v.dot_pairs(b, b.load(total), weights, states), total)

    return _tile(rows, group, BFLOAT16_GROUP_BYTES)


def _int4_group(b: Any, tile: _Tile, index: Any) -> tuple[list[Any], Any, Any]:
    """A group's four vectors of nibbles, scales and minimums."""
    block = v.at(b, tile.weights, b.mul(index, v.constant(INT4_GROUP_BYTES)))
    packed = [v.load(b, v.at(b, block, 64 * j), v.INTS, 64) for j in range(4)]
    scale, minimum = (v.widen_half(b, v.at(b, block, offset)) for offset in (256, 288))
    return packed, scale, minimum


def _tile(rows: int, group: Any, group_bytes: int) -> Any:
    """Wraps the work on one group into the loop over groups, with the sums of all rows in registers.

    Meanwhile the next tile's weights are fetched: the CPU's own prefetching stops where this tile is read again for
    more rows.
    """

    @from_llvm(types.void, *[_ADDRESS] * len(_Tile._fields))
    def tile(b: Any, *values: Any) -> None:
        arguments = _Tile(*values)
        bias = v.load(b, arguments.bias, v.FLOATS)
        totals = [cgutils.alloca_once(b, v.FLOATS) for _ in range(rows)]
        for total in totals:
            b.store(bias, total)
        with cgutils.for_range(b, arguments.num_groups, intp=v.INT64) as loop:
            ahead = b.mul(b.add(arguments.num_groups, loop.index), v.constant(group_bytes))
            for line in range(0, group_bytes, 64):
                v.fetch(b, v.at(b, arguments.weights, b.add(ahead, v.constant(line))))
            group(b, arguments, loop.index, totals)
        for row, total in enumerate(totals):
            v.store(b, b.load(total), v.at(b, arguments.out, b.mul(arguments.out_stride, v.constant(row))))

    return tile


def _dot_group(b: Any, tile: _Tile, index: Any, row: int, weights: list[Any]) -> Any:
    """The sum over one group as float32; in two halves, so that one need not wait for the other."""
    sums = [v.all_lanes(v.INTS, 0)] * 2
    place = b.mul(index, v.constant(2 * GROUP))
    for pair, pairs in enumerate(weights):
        states = v.splat(b, v.load(b, _in_row(b, tile, row, b.add(place, v.constant(4 * pair))), v.INT32))
        sums[pair % 2] = v.dot_shorts(b, sums[pair % 2], pairs, states)
    return b.sitofp(b.add(*sums), v.FLOATS)


def _in_row(b: Any, tile: _Tile, row: int, place: Any) -> Any:
    return b.add(tile.states, b.add(b.mul(tile.states_stride, v.constant(row)), place))


def _splat_at(b: Any, table: Any, tile: _Tile, index: Any, row: int) -> Any:
    """Element (row, index) of a float32 table with `num_groups` columns, in all lanes."""
    place = b.add(b.mul(tile.num_groups, v.constant(row)), index)
    return v.splat(b, v.load(b, v.at(b, table, b.mul(place, v.constant(4))), v.FLOAT))
