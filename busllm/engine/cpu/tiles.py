"""Products of a few rows with 16 columns' worth of weights: the innermost loops, written in LLVM.

Owns: one function per number format and number of rows. A sum is added up in the same order at every number of rows,
so a row has the same bits alone and in any batch.
Does not know: matrices (`linear.py` walks over tiles and rows), sequences.

Quantised weights are multiplied by states that are uint8 with a scale and a zero point per group of 32: four per 32-bit
lane, products and the sum of a group in int32, which is exact. A few inputs are kept apart in float32 (`outliers.py`).

Weights lie by tile of 16 outputs and within it by group of 32 inputs (bfloat16: by pair of inputs); see `pack.py`:
    int4      4 vectors of 64 bytes: lane n of vector j has the inputs 8j … 8j + 3 of output n in the lower nibbles of
              its four bytes and 8j + 4 … 8j + 7 in the upper ones; then 16 scales and 16 minimums in float16
    int8      8 vectors of 64 bytes: lane n of vector j has the inputs 4j … 4j + 3 of output n; then 16 scales in
              float32
    bfloat16  16 vectors of 16 pairs
"""

from __future__ import annotations

from typing import Any, NamedTuple

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils

from busllm.engine.cpu import vectors as v
from busllm.engine.cpu.compiled import from_llvm
from busllm.engine.cpu.shapes import MOST_OUTLIERS

GROUP = 32  # inputs that share a scale
_FEW_ROWS = 2  # with these a tile takes no longer than its weights come from memory
_AHEAD_BYTES = 16 * 1024  # what is fetched meanwhile lies so far ahead
INT4_GROUP_BYTES = 4 * 64 + 2 * 32
INT8_GROUP_BYTES = 8 * 64 + 64
BFLOAT16_PAIR_BYTES = 64
BFLOAT16_GROUP_BYTES = GROUP // 2 * BFLOAT16_PAIR_BYTES

_ADDRESS = types.int64


class _Tile(NamedTuple):
    """Arguments of a tile, as LLVM values.

    Attributes:
        weights, bias, states, out: addresses of one tile's weights, 16 float32, the first row's inputs and results.
        states_stride, out_stride: bytes from row to row.
        scales, lows, sums: addresses of float32 (rows, num_groups), see `Workspace`; unused where the format has none.
        num_groups: int64.
        channels, num_channels: address of int64, which inputs are kept apart, and how many.
        outliers: address of float32 (rows, MOST_OUTLIERS), these inputs.
    """

    weights: Any
    bias: Any
    states: Any
    states_stride: Any
    scales: Any
    lows: Any
    sums: Any
    num_groups: Any
    channels: Any
    num_channels: Any
    outliers: Any
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


@from_llvm(types.int64, _ADDRESS)
def int64_at(b, address):
    """An int64."""
    return v.load(b, address, v.INT64, 8)


@from_llvm(types.void, _ADDRESS, types.float32)
def put_float(b, address, x):
    """Writes a float32."""
    v.store(b, x, address)


@from_llvm(types.float32, _ADDRESS)
def bfloat16_at(b, address):
    """A bfloat16 as float32."""
    bits = b.zext(v.load(b, address, v.INT16, 2), v.INT32)
    return b.bitcast(b.shl(bits, ir.Constant(v.INT32, 16)), v.FLOAT)


def int4_tile(rows: int) -> Any:
    """y = bias + Σ over groups of scale · (s · Σ q · x + low · Σ q) + minimum · Σ (s · x + low), with x in uint8.

    Returns:
        A compiled function with the arguments of `_Tile`.
    """
    nibbles, four = v.all_lanes(v.INTS, 0x0F0F0F0F), v.all_lanes(v.INTS, 4)

    def group(b: Any, tile: _Tile, index: Any, totals: list[Any]) -> None:
        block = v.at(b, tile.weights, b.mul(index, v.constant(INT4_GROUP_BYTES)))
        packed = [v.load(b, v.at(b, block, 64 * j), v.INTS, 64) for j in range(4)]
        scale, minimum = (v.widen_half(b, v.at(b, block, offset)) for offset in (256, 288))
        weights = [half for x in packed for half in (b.and_(x, nibbles), b.and_(b.lshr(x, four), nibbles))]
        shift = b.fmul(scale, _sum_of_nibbles(b, weights))
        for row, total in enumerate(totals):
            y = _add_group(b, tile, index, row, _Group(weights, scale, shift, fits_short=True), total)
            b.store(v.fma(b, minimum, _splat_at(b, tile.sums, tile, index, row), y), total)

    def outlier(b: Any, block: Any, place: Any) -> Any:
        vector = b.add(block, b.shl(b.lshr(place, v.constant(3)), v.constant(6)))
        up = b.add(b.shl(b.and_(place, v.constant(3)), v.constant(3)), b.and_(place, v.constant(4)))  # to its nibble
        nibble = b.lshr(v.load(b, vector, v.INTS, 64), v.splat(b, b.trunc(up, v.INT32)))
        scale, minimum = (v.widen_half(b, v.at(b, block, offset)) for offset in (256, 288))
        return v.fma(b, b.sitofp(b.and_(nibble, v.all_lanes(v.INTS, 15)), v.FLOATS), scale, minimum)

    return _tile(rows, group, INT4_GROUP_BYTES, outlier)


def int8_tile(rows: int) -> Any:
    """y = bias + Σ over groups of scale · (s · Σ q · x + low · Σ q), with x in uint8; arguments of `_Tile`."""

    def group(b: Any, tile: _Tile, index: Any, totals: list[Any]) -> None:
        block = v.at(b, tile.weights, b.mul(index, v.constant(INT8_GROUP_BYTES)))
        weights = [v.load(b, v.at(b, block, 64 * j), v.INTS, 64) for j in range(8)]
        scale = v.load(b, v.at(b, block, 512), v.FLOATS, 64)
        shift = b.fmul(scale, _sum_of(b, weights))
        for row, total in enumerate(totals):
            b.store(_add_group(b, tile, index, row, _Group(weights, scale, shift, fits_short=False), total), total)

    def outlier(b: Any, block: Any, place: Any) -> Any:
        vector = b.add(block, b.shl(b.lshr(place, v.constant(2)), v.constant(6)))
        up = b.shl(b.sub(v.constant(3), b.and_(place, v.constant(3))), v.constant(3))  # its byte to the highest
        highest = b.shl(v.load(b, vector, v.INTS, 64), v.splat(b, b.trunc(up, v.INT32)))
        scale = v.load(b, v.at(b, block, 512), v.FLOATS, 64)
        return b.fmul(b.sitofp(b.ashr(highest, v.all_lanes(v.INTS, 24)), v.FLOATS), scale)

    return _tile(rows, group, INT8_GROUP_BYTES, outlier)


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


class _Group(NamedTuple):
    """One group's weights of 16 outputs: 8 vectors of four bytes per lane, their scale, scale times their sum."""

    weights: list[Any]
    scale: Any
    shift: Any
    fits_short: bool


def _sum_of(b: Any, weights: list[Any]) -> Any:
    """The sums of a group's weights, float32."""
    total = v.all_lanes(v.INTS, 0)
    for quads in weights:
        total = v.dot_bytes(b, total, v.all_lanes(v.INTS, 0x01010101), quads, fits_short=True)
    return b.sitofp(total, v.FLOATS)


def _sum_of_nibbles(b: Any, weights: list[Any]) -> Any:
    """The same for bytes of 0 … 15, of which eight fit into one; leaves the multiplying ports to others."""
    kind = ir.VectorType(v.INT8, 4 * v.LANES)
    parts = [b.bitcast(quads, kind) for quads in weights]
    while len(parts) > 1:
        parts = [b.add(first, second) for first, second in zip(parts[::2], parts[1::2], strict=True)]
    return _sum_of(b, [b.bitcast(parts[0], v.INTS)])


def _add_group(b: Any, tile: _Tile, index: Any, row: int, group: _Group, total: Any) -> Any:
    """One row's total with a group's products: + scale · s · Σ q · x + shift · low."""
    dots, first = [v.all_lanes(v.INTS, 0)] * 2, b.mul(index, v.constant(GROUP))
    for quad, quads in enumerate(group.weights):
        states = v.splat(b, v.load(b, _in_row(b, tile, row, b.add(first, v.constant(4 * quad))), v.INT32))
        dots[quad % 2] = v.dot_bytes(b, dots[quad % 2], states, quads, fits_short=group.fits_short)
    dot = b.add(*dots)
    own, low = (_splat_at(b, table, tile, index, row) for table in (tile.scales, tile.lows))
    y = v.fma(b, b.sitofp(dot, v.FLOATS), b.fmul(group.scale, own), b.load(total))
    return v.fma(b, group.shift, low, y)


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


def _in_row(b: Any, tile: _Tile, row: int, place: Any) -> Any:
    return b.add(tile.states, b.add(b.mul(tile.states_stride, v.constant(row)), place))


def _splat_at(b: Any, table: Any, tile: _Tile, index: Any, row: int) -> Any:
    """Element (row, index) of a float32 table with `num_groups` columns, in all lanes."""
    place = b.add(b.mul(tile.num_groups, v.constant(row)), index)
    return v.splat(b, v.load(b, v.at(b, table, b.mul(place, v.constant(4))), v.FLOAT))
