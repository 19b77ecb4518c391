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
from busllm.engine.cpu.inputs import PIECES, piece_address
from busllm.engine.cpu.shapes import GROUP, MOST_OUTLIERS, VECTOR, Field, Format

_INT4, _INT8 = int(Format.INT4), int(Format.INT8)
_FORMAT, _WEIGHTS, _BIAS, _NUM_TILES, _NUM_GROUPS, _CHANNELS, _NUM_CHANNELS = (int(field) for field in Field)
_INT4_BYTES, _INT8_BYTES, _BFLOAT16_BYTES = tiles.INT4_GROUP_BYTES, tiles.INT8_GROUP_BYTES, tiles.BFLOAT16_GROUP_BYTES
# That go through all tiles before the next ones: their inputs stay in a core's second-level cache.
BLOCK_ROWS = 264 // PIECES[0] * PIECES[0]
_TILES_BYTES = 24 * 1024  # of weights, or one tile, that a piece goes through at once, so that it is read once for all
_OUTLIERS_BYTES = MOST_OUTLIERS * 4
_float = np.float32


def _some_rows(make_tile: Any, pieces: tuple[int, ...]) -> Any:
    """Some of a tile's rows, in the largest piece that there are enough for; gives back how many."""
    size, tile = pieces[0], make_tile(pieces[0])
    fewer = _some_rows(make_tile, pieces[1:]) if len(pieces) > 1 else None

    @njit(nogil=True)
    def multiply_some(rows, weights, bias, piece, groups, channels, kept, large, out, stride):
        if fewer is not None and rows < size:
            return fewer(rows, weights, bias, piece, groups, channels, kept, large, out, stride)
        tile(weights, bias, piece, groups, channels, kept, large, out, stride)
        return size

    return multiply_some


def _some_tiles(make_tile: Any, group_bytes: int) -> Any:
    """Rows first … end - 1 of consecutive tiles: a piece of rows goes through all of them."""
    multiply_some = _some_rows(make_tile, PIECES)

    @njit(nogil=True)
    def multiply_tiles(weights, bias, inputs, groups, channels, kept, outliers, out, stride, first, end, num_tiles):
        row = first
        while row < end:
            piece, large, done = piece_address(inputs, row), outliers + row * _OUTLIERS_BYTES, 0
            for tile in range(num_tiles):
                w, b = weights + tile * groups * group_bytes, bias + tile * VECTOR * 4
                to = out + row * stride + tile * VECTOR * 4
                done = multiply_some(end - row, w, b, piece, groups, channels, kept, large, to, stride)
            row += done

    return multiply_tiles


_int4_tiles = _some_tiles(tiles.int4_tile, _INT4_BYTES)
_int8_tiles = _some_tiles(tiles.int8_tile, _INT8_BYTES)
_bfloat16_tiles = _some_tiles(tiles.bfloat16_tile, _BFLOAT16_BYTES)


@njit(nogil=True)
def block_rows(rows):
    """Rows that go through some linears at a time: equal shares of all, whole pieces, at most `BLOCK_ROWS`."""
    blocks = max(1, (rows + BLOCK_ROWS - 1) // BLOCK_ROWS)
    return max(1, (rows + blocks * PIECES[0] - 1) // (blocks * PIECES[0])) * PIECES[0]


@njit(nogil=True, parallel=True)
def multiply(linear, space, firsts, out):
    """out = inputs · weightsᵀ + bias, by one matrix or by several of one shape, each with rows of its own.

    A part of the work is the same share of every matrix, so parts are equal however many rows a matrix has.

    Args:
        linear: int64, by `Field`; several matrices lie one after the other.
        space: Workspace; its `inputs` were made by `prepare_row` for the same rows of each matrix.
        firsts: int64 (matrices + 1,): matrix m has the rows from firsts[m] up to firsts[m + 1].
        out: float32 (at least all rows, at least 16 * tiles of a matrix).
    """
    parts = space.num_parts
    for index in prange(parts):
        part = np.int64(index)
        multiply_part(linear, space.inputs, space.outliers, firsts, out, part, parts)


@njit(nogil=True)
def multiply_part(linear, inputs, outliers, firsts, out, part, parts):
    """Part `part` of `parts` of each matrix's outputs, by one core.

    Args:
        linear, firsts, out: as in `multiply`.
        inputs, outliers: of the `Workspace`.
        part, parts: 0 … parts - 1.
    """
    kind, groups, weights, bias = linear[_FORMAT], linear[_NUM_GROUPS], linear[_WEIGHTS], linear[_BIAS]
    channels, kept, large = linear[_CHANNELS], linear[_NUM_CHANNELS], outliers.ctypes.data
    to, stride = out.ctypes.data, out.shape[1] * 4
    num_tiles = linear[_NUM_TILES] // (len(firsts) - 1)
    group_bytes = _INT4_BYTES if kind == _INT4 else _INT8_BYTES if kind == _INT8 else _BFLOAT16_BYTES
    together = max(1, _TILES_BYTES // (groups * group_bytes))
    first_tile, end_tile = part * num_tiles // parts, (part + 1) * num_tiles // parts
    for matrix in range(len(firsts) - 1):
        for first in range(firsts[matrix], firsts[matrix + 1], BLOCK_ROWS):
            end = min(firsts[matrix + 1], first + BLOCK_ROWS)
            for tile in range(first_tile, end_tile, together):
                n, place = min(together, end_tile - tile), matrix * num_tiles + tile
                w, b, o = weights + place * groups * group_bytes, bias + place * VECTOR * 4, to + tile * VECTOR * 4
                if kind == _INT4:
                    _int4_tiles(w, b, inputs, groups, channels, kept, large, o, stride, first, end, n)
                elif kind == _INT8:
                    _int8_tiles(w, b, inputs, groups, channels, kept, large, o, stride, first, end, n)
                else:
                    _bfloat16_tiles(w, b, inputs, groups, channels, kept, large, o, stride, first, end, n)


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
                out[first + index] = _float(byte - 128) * scale
        else:
            block = linear[_WEIGHTS] + (tile * groups + group) * _BFLOAT16_BYTES
            for index in range(GROUP):
                out[first + index] = tiles.bfloat16_at(block + 64 * (index // 2) + 4 * lane + 2 * (index % 2))
