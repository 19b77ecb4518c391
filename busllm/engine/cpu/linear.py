"""Linear layers: rows of quantised or bfloat16 states times a packed matrix, in parallel over its outputs.

Owns: the walk over tiles and rows, and reading rows of an embedding out of the same layout.
Does not know: the innermost loops (`tiles.py`), which layer it is.
Next on the path: `step.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from busllm.engine.cpu import tiles
from busllm.engine.cpu.elementwise import quantise_row, round_row
from busllm.engine.cpu.shapes import GROUP, MOST_OUTLIERS, VECTOR, Field, Format
from busllm.engine.cpu.vectors import INSTRUCTIONS

_INT4, _INT8, _BFLOAT16 = int(Format.INT4), int(Format.INT8), int(Format.BFLOAT16)
_FORMAT, _WEIGHTS, _BIAS, _NUM_TILES, _NUM_GROUPS, _CHANNELS, _NUM_CHANNELS = (int(field) for field in Field)
_INT4_BYTES, _INT8_BYTES, _BFLOAT16_BYTES = tiles.INT4_GROUP_BYTES, tiles.INT8_GROUP_BYTES, tiles.BFLOAT16_GROUP_BYTES
# Rows whose sums stay in registers: 32 registers of 512 bits hold twice as many as 16 of 256.
_IS_WIDE = INSTRUCTIONS.vector_bits == 512
_FEW, _MANY = ((8, 4, 2, 1), (16, 8, 4, 2, 1)) if _IS_WIDE else ((4, 2, 1), (4, 2, 1))
_BLOCK_ROWS = 256  # that go through all tiles before the next ones: their inputs stay in a core's second-level cache
_float = np.float32


def _walk(make_tile: Any, pieces: tuple[int, ...]) -> Any:
    """All rows of one tile, in the largest pieces that there are."""
    size, tile = pieces[0], make_tile(pieces[0])
    walk_rest = _walk(make_tile, pieces[1:]) if len(pieces) > 1 else None

    @njit(nogil=True)
    def walk(weights, bias, states, stride, scales, lows, sums, groups, channels, kept, large, out, out_stride, rows):
        row = 0
        while row + size <= rows:
            x, o, g, k = states + row * stride, out + row * out_stride, row * groups * 4, large + row * _LARGE_BYTES
            tile(weights, bias, x, stride, scales + g, lows + g, sums + g, groups, channels, kept, k, o, out_stride)
            row += size
        if walk_rest is not None and row < rows:
            x, o, g, k = states + row * stride, out + row * out_stride, row * groups * 4, large + row * _LARGE_BYTES
            a, b, c, rest = scales + g, lows + g, sums + g, rows - row
            walk_rest(weights, bias, x, stride, a, b, c, groups, channels, kept, k, o, out_stride, rest)

    return walk


_LARGE_BYTES = MOST_OUTLIERS * 4
_walk_int4, _walk_int8 = (_walk(make, _MANY) for make in (tiles.int4_tile, tiles.int8_tile))
_walk_bfloat16 = _walk(tiles.bfloat16_tile, _FEW)


@njit(nogil=True, parallel=True)
def multiply(linear, space, firsts, out):
    """out = inputs · weightsᵀ + bias, by one matrix or by several of one shape, each with rows of its own.

    A part of the work is the same share of every matrix, so parts are equal however many rows a matrix has.

    Args:
        linear: int64, by `Field`; several matrices lie one after the other.
        space: Workspace; its `inputs` were made by `prepare_row`.
        firsts: int64 (matrices + 1,): matrix m has the rows from firsts[m] up to firsts[m + 1].
        out: float32 (at least all rows, at least 16 * tiles of a matrix).
    """
    kind, groups, weights, bias = linear[_FORMAT], linear[_NUM_GROUPS], linear[_WEIGHTS], linear[_BIAS]
    channels, kept, large = linear[_CHANNELS], linear[_NUM_CHANNELS], space.outliers.ctypes.data
    scales, lows, sums = space.scales.ctypes.data, space.lows.ctypes.data, space.sums.ctypes.data
    to, to_stride = out.ctypes.data, out.shape[1] * 4
    states, stride = space.inputs.ctypes.data, space.inputs.shape[1] * 2
    num_tiles, parts = linear[_NUM_TILES] // (len(firsts) - 1), space.num_parts
    for part in prange(parts):
        first_tile, end_tile = part * num_tiles // parts, (part + 1) * num_tiles // parts
        for matrix in range(len(firsts) - 1):
            for row in range(firsts[matrix], firsts[matrix + 1], _BLOCK_ROWS):
                rows = min(firsts[matrix + 1] - row, _BLOCK_ROWS)
                x, y, table = states + row * stride, to + row * to_stride, row * groups * 4
                s, c, d, k = scales + table, lows + table, sums + table, large + row * _LARGE_BYTES
                for tile in range(first_tile, end_tile):
                    place = matrix * num_tiles + tile
                    b, o = bias + place * VECTOR * 4, y + tile * VECTOR * 4
                    if kind == _INT4:
                        w = weights + place * groups * _INT4_BYTES
                        _walk_int4(w, b, x, stride, s, c, d, groups, channels, kept, k, o, to_stride, rows)
                    elif kind == _INT8:
                        w = weights + place * groups * _INT8_BYTES
                        _walk_int8(w, b, x, stride, s, c, d, groups, channels, kept, k, o, to_stride, rows)
                    else:
                        w = weights + place * groups * _BFLOAT16_BYTES
                        _walk_bfloat16(w, b, x, stride, s, c, d, groups, channels, kept, k, o, to_stride, rows)


@njit(nogil=True)
def prepare_row(linear, space, row, source):
    """Makes the linear's input format of a float32 row (an address), padded to whole groups.

    What is kept apart is taken out of the row while its group is rounded.
    """
    out, groups = space.inputs[row].ctypes.data, linear[_NUM_GROUPS]
    if linear[_FORMAT] == _BFLOAT16:
        round_row(source, groups, out)
        return
    first, end = row * groups, (row + 1) * groups
    kept, large = linear[_NUM_CHANNELS], space.outliers[row]
    for index in range(kept):
        place = source + 4 * tiles.int64_at(linear[_CHANNELS] + 8 * index)
        large[index] = tiles.float_at(place)
        tiles.put_float(place, _float(0.0))
    quantise_row(source, groups, out, space.scales[first:end], space.lows[first:end], space.sums[first:end])
    for index in range(kept):
        tiles.put_float(source + 4 * tiles.int64_at(linear[_CHANNELS] + 8 * index), large[index])


@njit(nogil=True)
def read_row(linear, row, out):
    """Row `row` of the matrix itself as float32, as an embedding needs it; out: (at least 32 * num_groups,)."""
    kind, groups = linear[_FORMAT], linear[_NUM_GROUPS]
    tile, lane = row // VECTOR, row % VECTOR
    for group in range(groups):
        first = group * GROUP
        if kind == _INT4:
            block = linear[_WEIGHTS] + (tile * groups + group) * _INT4_BYTES
            scale = tiles.half_at(block + 256 + 2 * lane)
            minimum = tiles.half_at(block + 288 + 2 * lane)
            for index in range(GROUP):
                byte = tiles.byte_at(block + 64 * (index // 8) + 4 * lane + index % 4)
                out[first + index] = _float((byte >> (index % 8 // 4 * 4)) & 15) * scale + minimum
        elif kind == _INT8:
            block = linear[_WEIGHTS] + (tile * groups + group) * _INT8_BYTES
            scale = tiles.float_at(block + 512 + 4 * lane)
            for index in range(GROUP):
                byte = tiles.byte_at(block + 64 * (index // 4) + 4 * lane + index % 4)
                out[first + index] = _float(byte) * scale
        else:
            block = linear[_WEIGHTS] + (tile * groups + group) * _BFLOAT16_BYTES
            for index in range(GROUP):
                out[first + index] = tiles.bfloat16_at(block + 64 * (index // 2) + 4 * lane + 2 * (index % 2))
