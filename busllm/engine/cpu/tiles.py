"""Products of a few rows with 16 columns' worth of weights: the innermost loops, written in LLVM.

Owns: one function per number format and number of rows. A sum is added up in the same order at every number of rows,
so a row has the same bits alone and in any batch.
Does not know: matrices (`linear.py` walks over tiles and rows), sequences.

Quantised weights are bytes without a sign, states int8 with a scale and a zero point per group of 32: four per 32-bit
lane, products and the sum of a group in int32, which is exact. A few inputs are kept apart in float32 (`outliers.py`).

Weights lie by tile of 16 outputs and within it by group of 32 inputs (bfloat16: by pair of inputs); see `pack.py`:
    int4      4 vectors of 64 bytes: lane n of vector j has the inputs 8j … 8j + 3 of output n in the lower nibbles of
              its four bytes and 8j + 4 … 8j + 7 in the upper ones; then 16 scales and 16 minimums in float16
    int8      8 vectors of 64 bytes: lane n of vector j has the inputs 4j … 4j + 3 of output n, each with 128 added;
              then 16 scales in float32
    bfloat16  16 vectors of 16 pairs
"""

from __future__ import annotations

from typing import Any, NamedTuple

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils

from busllm.engine.cpu import vectors as v
from busllm.engine.cpu.compiled import from_llvm
from busllm.engine.cpu.shapes import GROUP, MOST_OUTLIERS

_FEW_ROWS = 2  # with these a tile takes no longer than its weights come from memory
_AHEAD_BYTES = 16 * 1024  # what is fetched meanwhile lies so far ahead
INT4_GROUP_BYTES = 4 * 64 + 2 * 32
INT8_GROUP_BYTES = 8 * 64 + 64
BFLOAT16_PAIR_BYTES = 64
BFLOAT16_GROUP_BYTES = GROUP // 2 * BFLOAT16_PAIR_BYTES
# One group of a row's inputs: int8 and three numbers, or bfloat16 (`inputs.py`).
INPUT_BYTES = GROUP + 3 * 4
BFLOAT16_INPUT_BYTES = GROUP * 2
_SCALES, _OFFSETS, _STARTS = range(3)

_ADDRESS = types.int64


class _Tile(NamedTuple):
    """Arguments of a tile, as LLVM values.

    Attributes:
        weights, bias, out: addresses of one tile's weights, 16 float32, the first row's results.
        out_stride: bytes from row to row.
        states: address of the inputs of a piece of so many rows as the tile has, see `inputs.py`.
        num_groups: int64.
        channels, num_channels: address of int64, which inputs are kept apart, and how many.
        outliers: address of float32 (rows, MOST_OUTLIERS), these inputs.
    """

    weights: Any
    bias: Any
    states: Any
    num_groups: Any
    channels: Any
    num_channels: Any
    outliers: Any
    out: Any
    out_stride: Any


@from_llvm(types.int32, _ADDRESS)
def byte_at(b, address):
    """A byte without a sign."""
    return b.zext(v.load(b, address, v.INT8, 1), v.INT32)


@from_llvm(types.float32, _ADDRESS)
def half_at(b, address):
    """A float16 as float32."""
    return b.fpext(v.load(b, address, v.HALF, 2), v.FLOAT)


@from_llvm(types.float32, _ADDRESS)
def float_at(b, address):
    """A float32."""
    return v.load(b, address, v.FLOAT)


@from_llvm(types.int64, _ADDRESS)
def int64_at(b, address):
    """An int64."""
    return v.load(b, address, v.INT64, 8)


@from_llvm(types.void, _ADDRESS, types.float32)
def put_float(b, address, x):
    """Writes a float32."""
    v.store(b, x, address)


@from_llvm(types.void, _ADDRESS, types.int64)
def put_int32(b, address, x):
    """Writes the lower half."""
    v.store(b, b.trunc(x, v.INT32), address)


@from_llvm(types.float32, _ADDRESS)
def bfloat16_at(b, address):
    """A bfloat16 as float32."""
    bits = b.zext(v.load(b, address, v.INT16, 2), v.INT32)
    return b.bitcast(b.shl(bits, ir.Constant(v.INT32, 16)), v.FLOAT)


def int4_tile(rows: int) -> Any:
    """y = bias + Σ over groups of scale · s · (Σ q · x + z · Σ q) + minimum · Σ s · (x + z), with x and z in int8.

    The sum of a group's q is one of bytes, in each of which eight q fit: one more product of the same kind.

    Returns:
        A compiled function with the arguments of `_Tile`.
    """
    nibbles, four = v.all_lanes(v.INTS, 0x0F0F0F0F), v.all_lanes(v.INTS, 4)

    def group(b: Any, tile: _Tile, index: Any, totals: list[Any]) -> None:
        block = v.at(b, tile.weights, b.mul(index, v.constant(INT4_GROUP_BYTES)))
        dots, sums = [v.all_lanes(v.INTS, 0)] * rows, v.all_lanes(v.INTS, 0)
        for quad in range(0, 8, 2):
            packed = v.load(b, v.at(b, block, 32 * quad), v.INTS, 64)
            lower, upper = b.and_(packed, nibbles), b.and_(b.lshr(packed, four), nibbles)
            sums = v.add_bytes(b, sums, v.add_bytes(b, lower, upper))
            dots = _add_quads(b, tile, index, quad, lower, dots, is_small=True)
            dots = _add_quads(b, tile, index, quad + 1, upper, dots, is_small=True)
        for row, dot in enumerate(dots):
            zero_point = _in_table(b, tile, _STARTS, index, row, rows, v.INT32)
            dots[row] = v.dot_bytes(b, dot, sums, zero_point, is_small=True)
        scale, minimum = (v.widen_half(b, v.at(b, block, offset)) for offset in (256, 288))
        for row, (total, dot) in enumerate(zip(totals, dots, strict=True)):
            y = _add_scaled(b, tile, index, row, rows, scale, dot, b.load(total))
            b.store(v.fma(b, minimum, _in_table(b, tile, _OFFSETS, index, row, rows), y), total)

    def outlier(b: Any, block: Any, place: Any) -> Any:
        vector = b.add(block, b.shl(b.lshr(place, v.constant(3)), v.constant(6)))
        up = b.add(b.shl(b.and_(place, v.constant(3)), v.constant(3)), b.and_(place, v.constant(4)))  # to its nibble
        nibble = b.lshr(v.load(b, vector, v.INTS, 64), v.splat(b, b.trunc(up, v.INT32)))
        scale, minimum = (v.widen_half(b, v.at(b, block, offset)) for offset in (256, 288))
        return v.fma(b, b.sitofp(b.and_(nibble, v.all_lanes(v.INTS, 15)), v.FLOATS), scale, minimum)

    return _tile(rows, group, INT4_GROUP_BYTES, outlier)


def int8_tile(rows: int) -> Any:
    """y = bias + Σ over groups of scale · s · (Σ (q + 128) · x - 128 · Σ x) + scale · Σ q · s · z, with x in int8.

    Returns:
        As `int4_tile`.
    """

    def group(b: Any, tile: _Tile, index: Any, totals: list[Any]) -> None:
        block = v.at(b, tile.weights, b.mul(index, v.constant(INT8_GROUP_BYTES)))
        dots = [_in_table(b, tile, _STARTS, index, row, rows, v.INT32) for row in range(rows)]
        sums, ones = v.all_lanes(v.INTS, -128 * GROUP), v.all_lanes(v.INTS, 0x01010101)
        for quad in range(8):
            quads = v.load(b, v.at(b, block, 64 * quad), v.INTS, 64)
            sums = v.dot_bytes(b, sums, quads, ones, is_small=False)
            dots = _add_quads(b, tile, index, quad, quads, dots, is_small=False)
        scale = v.load(b, v.at(b, block, 512), v.FLOATS, 64)
        shift = b.fmul(scale, b.sitofp(sums, v.FLOATS))
        for row, (total, dot) in enumerate(zip(totals, dots, strict=True)):
            y = _add_scaled(b, tile, index, row, rows, scale, dot, b.load(total))
            b.store(v.fma(b, shift, _in_table(b, tile, _OFFSETS, index, row, rows), y), total)

    def outlier(b: Any, block: Any, place: Any) -> Any:
        vector = b.add(block, b.shl(b.lshr(place, v.constant(2)), v.constant(6)))
        up = b.shl(b.sub(v.constant(3), b.and_(place, v.constant(3))), v.constant(3))  # its byte to the highest
        highest = b.shl(v.load(b, vector, v.INTS, 64), v.splat(b, b.trunc(up, v.INT32)))
        weight = b.ashr(b.xor(highest, v.all_lanes(v.INTS, -(2**31))), v.all_lanes(v.INTS, 24))  # 128 less
        return b.fmul(b.sitofp(weight, v.FLOATS), v.load(b, v.at(b, block, 512), v.FLOATS, 64))

    return _tile(rows, group, INT8_GROUP_BYTES, outlier)


def bfloat16_tile(rows: int) -> Any:
    """y = bias + Σ over pairs of inputs, both in bfloat16; arguments of `_Tile`."""

    def group(b: Any, tile: _Tile, index: Any, totals: list[Any]) -> None:
        block = v.at(b, tile.weights, b.mul(index, v.constant(BFLOAT16_GROUP_BYTES)))
        for pair in range(GROUP // 2):
            weights = v.load(b, v.at(b, block, BFLOAT16_PAIR_BYTES * pair), v.INTS, 64)
            for row, total in enumerate(totals):
                first = b.add(tile.states, b.mul(index, v.constant(rows * BFLOAT16_INPUT_BYTES)))
                states = v.splat(b, v.load(b, v.at(b, first, 2 * GROUP * row + 4 * pair), v.INT32))
                b.store(v.dot_pairs(b, b.load(total), weights, states), total)

    return _tile(rows, group, BFLOAT16_GROUP_BYTES)


def _add_quads(b: Any, tile: _Tile, index: Any, quad: int, quads: Any, dots: list[Any], *, is_small: bool) -> list[Any]:
    """Each row's products with the quad-th four inputs of a group added to its sum.

    All rows one after the other: so few vectors of weights are held at a time, and the states come from memory within
    the instruction that multiplies.
    """
    first, added = b.add(tile.states, b.mul(index, v.constant(len(dots) * INPUT_BYTES))), []
    for row, dot in enumerate(dots):
        states = v.splat(b, v.load(b, v.at(b, first, GROUP * row + 4 * quad), v.INT32))
        added.append(v.dot_bytes(b, dot, quads, states, is_small=is_small))
    return added


def _add_scaled(b: Any, tile: _Tile, index: Any, row: int, rows: int, scale: Any, dot: Any, total: Any) -> Any:
    """total + scale · s · dot"""
    own = _in_table(b, tile, _SCALES, index, row, rows)
    return v.fma(b, b.sitofp(dot, v.FLOATS), b.fmul(scale, own), total)


def _tile(rows: int, group: Any, group_bytes: int, outlier: Any = None) -> Any:
    """Wraps the work on one group into the loop over groups, with the sums of all rows in registers.

    Meanwhile the next tile's weights are fetched: the CPU's own prefetching stops where this tile is read again for
    more rows. With few rows what is wanted soonest lies further ahead; of int8, which needs few instructions for a
    byte, the CPU then fetches better by itself.
    """
    is_fetched = rows > _FEW_ROWS or group_bytes != INT8_GROUP_BYTES

    @from_llvm(types.void, *[_ADDRESS] * len(_Tile._fields))
    def tile(b: Any, *values: Any) -> None:
        arguments = _Tile(*values)
        bias = v.load(b, arguments.bias, v.FLOATS)
        totals = [cgutils.alloca_once(b, v.FLOATS) for _ in range(rows)]
        for total in totals:
            b.store(bias, total)
        if outlier is not None:
            _add_outliers(b, arguments, totals, group_bytes, outlier)
        with cgutils.for_range(b, arguments.num_groups, intp=v.INT64) as loop:
            here = b.mul(loop.index, v.constant(group_bytes))
            tile_bytes = b.mul(arguments.num_groups, v.constant(group_bytes))
            ahead = b.add(here, v.constant(_AHEAD_BYTES) if rows <= _FEW_ROWS else tile_bytes)
            for line in range(0, group_bytes if is_fetched else 0, 64):
                v.fetch(b, v.at(b, arguments.weights, b.add(ahead, v.constant(line))))
            group(b, arguments, loop.index, totals)
        for row, total in enumerate(totals):
            v.store(b, b.load(total), v.at(b, arguments.out, b.mul(arguments.out_stride, v.constant(row))))

    return tile


def _add_outliers(b: Any, tile: _Tile, totals: list[Any], group_bytes: int, outlier: Any) -> None:
    """Adds what is kept apart: float32 times the weights of one input, which `outlier` reads from its group."""
    with cgutils.for_range(b, tile.num_channels, intp=v.INT64) as loop:
        channel = v.load(b, v.at(b, tile.channels, b.mul(loop.index, v.constant(8))), v.INT64, 8)
        group, place = b.lshr(channel, v.constant(5)), b.and_(channel, v.constant(GROUP - 1))
        weights = outlier(b, b.add(tile.weights, b.mul(group, v.constant(group_bytes))), place)
        for row, total in enumerate(totals):
            at = b.mul(b.add(loop.index, v.constant(MOST_OUTLIERS * row)), v.constant(4))
            state = v.splat(b, v.load(b, b.add(tile.outliers, at), v.FLOAT))
            b.store(v.fma(b, weights, state, b.load(total)), total)


def _in_table(b: Any, tile: _Tile, table: int, index: Any, row: int, rows: int, kind: Any = v.FLOAT) -> Any:
    """What a table has for a row of so many and a group, in all lanes."""
    first = b.add(tile.states, b.mul(index, v.constant(rows * INPUT_BYTES)))
    return v.splat(b, v.load(b, v.at(b, first, rows * GROUP + 4 * (rows * table + row)), kind))
