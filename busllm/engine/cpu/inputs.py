"""Inputs of a linear: rows of float32 rounded to what its weights are multiplied by.

Owns: the rounding, and where the inputs of a row lie.
Does not know: products (`tiles.py` reads what is written here), where rows come from.
Next on the path: `linear.py`.

The rows of a matrix are cut into pieces that are multiplied together. A piece lies together, group after group of 32
inputs, so that what a product reads comes one after the other and at fixed distances. One group of a piece:
    before int4, int8    32 int8 of each row, then the rows' scales (float32), offsets (float32) and starts (int32)
    before bfloat16      32 bfloat16 of each row
A number is scale * (integer + zero point), the zero point an integer, too. What stands in the other two depends on the
weights:
    before int4    offset: the sum of the group's numbers, which the weights' minimum multiplies
                   start: the zero point in each of four bytes, which the weights' sum multiplies
    before int8    offset: the number that integer 0 stands for, which the weights' sum multiplies
                   start: -128 times the sum of the integers, since 128 is added to packed weights
"""

from __future__ import annotations

import numpy as np
from numba import njit

from busllm.engine.cpu import lanes, tiles
from busllm.engine.cpu.instructions import ByteDot
from busllm.engine.cpu.shapes import GROUP, VECTOR, Field, Format
from busllm.engine.cpu.vectors import INSTRUCTIONS

_FORMAT, _NUM_GROUPS, _CHANNELS, _NUM_CHANNELS = (
    int(field) for field in (Field.FORMAT, Field.NUM_GROUPS, Field.CHANNELS, Field.NUM_CHANNELS)
)
_INT4, _BFLOAT16 = int(Format.INT4), int(Format.BFLOAT16)
_float = np.float32
_STEPS, _MOST = _float(254.0), _float(127.0)  # from the least to the largest int8 that is used; the largest
_UNSIGNED = _float(128.0)
_LEAST_RANGE = _float(1e-36)  # the inverse of a smaller one would be infinite: such numbers count as zeros
_BYTES, _BFLOAT16_BYTES = tiles.INPUT_BYTES, tiles.BFLOAT16_INPUT_BYTES
# Rows of a piece: as many of the largest as there are, then each of the others at most once. In 32 registers of 512
# bits the sums of 12 rows stay where one instruction multiplies and adds, those of 8 where it takes three.
_WIDE = (12, 8, 4, 2, 1) if INSTRUCTIONS.byte_dot is ByteDot.VNNI_512 else (8, 4, 2, 1)
PIECES = _WIDE if INSTRUCTIONS.vector_bits == 512 else (4, 2, 1)


@njit(nogil=True)
def rows_beside(row, firsts):
    """The first row of the same matrix and the one behind its last; firsts as in `multiply`."""
    matrix = np.searchsorted(firsts, row, side="right") - 1
    return firsts[matrix], firsts[matrix + 1]


@njit(nogil=True)
def piece_of(row, first, end):
    """Of a row among the rows first … end - 1 of a matrix: the first row of its piece, and how many that has."""
    begin = row - (row - first) % PIECES[0]
    if begin + PIECES[0] <= end:
        return begin, PIECES[0]
    for size in PIECES[1:]:
        if begin + size <= end:
            if row < begin + size:
                return begin, size
            begin += size
    return row, 1  # not reached


@njit(nogil=True)
def piece_address(inputs, begin):
    """Of the inputs of the piece that begins with this row; inputs: of a `Workspace`.

    Rows have room for the widest linear's inputs each, so cores that are at different linears keep out of each other's.
    """
    return inputs.ctypes.data + begin * inputs.shape[1]


@njit(nogil=True)
def prepare_row(linear, space, row, first, end, source):
    """Makes a linear's inputs of a row.

    What is kept apart is taken out of the row while its group is rounded.

    Args:
        linear: int64, by `Field`.
        space: Workspace, whose `inputs` and `outliers` get the row's.
        row: which of them.
        first, end: the rows of the same matrix are first … end - 1.
        source: address of float32, padded to whole groups.
    """
    kind, groups = linear[_FORMAT], linear[_NUM_GROUPS]
    begin, rows = piece_of(row, first, end)
    piece = piece_address(space.inputs, begin)
    if kind == _BFLOAT16:
        round_row(source, groups, piece + (row - begin) * GROUP * 2, rows)
        return
    kept, large = linear[_NUM_CHANNELS], space.outliers[row]
    for index in range(kept):
        place = source + 4 * tiles.int64_at(linear[_CHANNELS] + 8 * index)
        large[index] = tiles.float_at(place)
        tiles.put_float(place, _float(0.0))
    quantise_row(source, groups, kind == _INT4, piece, row - begin, rows)
    for index in range(kept):
        tiles.put_float(source + 4 * tiles.int64_at(linear[_CHANNELS] + 8 * index), large[index])


@njit(nogil=True)
def quantise_row(source, num_groups, before_int4, piece, place, rows):
    """Rounds a row to int8, each group between its smallest and its largest number; zero stays zero.

    A group with a number that is none has the scale NaN.

    Args:
        source: address of float32.
        num_groups: groups of the row.
        before_int4: the weights are int4, else int8.
        piece: address of the piece's inputs; integers are -127 … 127.
        place: of the row in the piece.
        rows: of the piece.
    """
    states, table, each = piece + place * GROUP, piece + rows * GROUP + place * 4, rows * 4
    for group in range(num_groups):
        first, second = lanes.load(source + group * GROUP * 4), lanes.load(source + group * GROUP * 4 + VECTOR * 4)
        most = max(lanes.largest(lanes.larger(first, second)), _float(0.0))
        least = min(lanes.smallest(lanes.smaller(first, second)), _float(0.0))
        is_zero = not most - least > _LEAST_RANGE
        inverse = _float(0.0) if is_zero else _STEPS / (most - least)
        zero_point = _MOST - np.rint(-least * inverse)
        by, down = lanes.splat(inverse), lanes.splat(-zero_point)
        low, high = lanes.splat(-_MOST), lanes.splat(_MOST)
        x = lanes.smaller(high, lanes.larger(low, lanes.multiply_add(first, by, down)))  # so that NaN comes through
        y = lanes.smaller(high, lanes.larger(low, lanes.multiply_add(second, by, down)))
        to = states + group * rows * _BYTES
        total = lanes.total(lanes.add(lanes.store_int8(to, x), lanes.store_int8(to + VECTOR, y)))
        scale = _float(0.0) if is_zero else (most - least) / _STEPS
        at = table + group * rows * _BYTES
        tiles.put_float(at, scale + (total - total))
        if before_int4:
            tiles.put_float(at + each, scale * (total + _float(GROUP) * zero_point))
            tiles.put_int32(at + 2 * each, (np.int64(zero_point) & 255) * 0x01010101)
        else:
            tiles.put_float(at + each, scale * zero_point)
            tiles.put_int32(at + 2 * each, np.int64(-_UNSIGNED * total))


@njit(nogil=True)
def round_row(source, num_groups, states, rows):
    """Rounds a row to bfloat16; addresses of float32 and of the first group's bfloat16; rows of the piece."""
    for group in range(num_groups):
        at, to = source + group * GROUP * 4, states + group * rows * _BFLOAT16_BYTES
        lanes.store_bfloat16(to, lanes.load(at))
        lanes.store_bfloat16(to + VECTOR * 2, lanes.load(at + VECTOR * 4))
