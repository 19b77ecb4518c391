"""Weights of a row of logits, and passes over all of them, as compiled code.

Owns: the exponential in float64, sums in one fixed order, and what is asked of all logits of a row.
Does not know: what is kept or drawn.
Next on the path: `compiled_kept.py`, `compiled_draw.py`.
"""

from __future__ import annotations

import math

import llvmlite.ir as ir
import numpy as np
from numba import njit, types

from busllm.engine.cpu import lanes
from busllm.engine.cpu import vectors as v
from busllm.engine.cpu.compiled import from_llvm

_float = np.float32
_VECTOR = v.LANES
_FOLDED = 16  # vectors that are added in float32 before the sum goes on in float64
FACTORS = 1e300  # the largest factor of logits; 1 / temperature may be infinite
BLOCK = 512  # logits whose weights are summed, and looked at, together
_LEAST_EXPONENT = -745.2  # e^-745.2 is 0 in float64
_MAGIC = 1.5 * 2.0**52  # a number added to it is rounded to a whole one, which stands in its lower bits
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_FLOAT_MAGIC = 1.5 * 2.0**23
_POWER = tuple(math.log(2) ** order / math.factorial(order) for order in range(6, -1, -1))  # Taylor, of 2^x
_DOUBLE, _BITS = ir.DoubleType(), v.INT64


@from_llvm(types.float64, types.float64)
def exponential(b, x):
    """e^x for x <= 0, off by about one unit in the last place.

    2^n times a polynomial (Taylor, on [-ln 2 / 2, ln 2 / 2]), in two steps, since 2^n may be too small for a number.
    Written for one number: the compiler makes vectors of a loop around it.
    """

    def number(value: float):
        return ir.Constant(_DOUBLE, value)

    def fma(p, q, r):
        return v.call(b, "llvm.fma.f64", _DOUBLE, p, q, r)

    def power(whole):
        return b.bitcast(b.shl(b.add(whole, v.constant(1023)), v.constant(52)), _DOUBLE)

    is_zero = b.fcmp_unordered("<", x, number(_LEAST_EXPONENT))
    x = b.select(is_zero, number(0.0), x)  # a product that is too small for a number takes long
    shifted = fma(x, number(1 / math.log(2)), number(_MAGIC))
    negative = b.fneg(b.fsub(shifted, number(_MAGIC)))
    rest = fma(negative, number(_LN2_LOW), fma(negative, number(_LN2_HIGH), x))
    result = number(1 / math.factorial(13))
    for order in range(12, -1, -1):
        result = fma(result, rest, number(1 / math.factorial(order)))
    magic_bits = int(np.float64(_MAGIC).view(np.int64))
    whole = b.sub(b.bitcast(shifted, _BITS), v.constant(magic_bits))
    half = b.sub(b.lshr(b.add(whole, v.constant(2048)), v.constant(1)), v.constant(1024))
    result = b.fmul(b.fmul(result, power(half)), power(b.sub(whole, half)))
    return b.select(is_zero, number(0.0), result)


@from_llvm(lanes.float32x16, lanes.float32x16, lanes.float32x16, lanes.float32x16)
def below(b, x, limit, y):
    """y in the lanes where x < limit, 0 in the others."""
    return b.select(b.fcmp_ordered("<", x, limit), y, v.all_lanes(v.FLOATS, 0.0))


@from_llvm(lanes.float32x16, lanes.float32x16, lanes.float32x16)
def estimate_power(b, x, by):
    """2^(x * by) for -125 <= x * by <= 0, off by 3e-7 of it and the rounding of `by`."""
    magic = v.all_lanes(v.FLOATS, _FLOAT_MAGIC)
    shifted = v.fma(b, x, by, magic)
    rest = v.fma(b, x, by, b.fneg(b.fsub(shifted, magic)))
    result = v.all_lanes(v.FLOATS, _POWER[0])
    for coefficient in _POWER[1:]:
        result = v.fma(b, result, rest, v.all_lanes(v.FLOATS, coefficient))
    exponent = b.shl(b.bitcast(shifted, v.INTS), v.all_lanes(v.INTS, 23))
    return b.bitcast(b.add(b.bitcast(result, v.INTS), exponent), v.FLOATS)


@from_llvm(types.boolean, types.int64, lanes.float32x16)
def any_above(b, address, limit):
    """Whether one of the 16 float32 at an address is not below `limit`."""
    found = b.bitcast(b.fcmp_ordered(">=", v.load(b, address, v.FLOATS), limit), v.INT16)
    return b.icmp_unsigned("!=", found, ir.Constant(v.INT16, 0))


@from_llvm(types.int64, types.int64, types.int64, types.int32, lanes.float32x16)
def list_lanes(b, address, out, first, limit):
    """Writes first + lane (int32) of the lanes of 16 float32 at `address` that are not below `limit`.

    `out` has room for 16; returns how many were written.
    """
    chosen = b.fcmp_ordered(">=", v.load(b, address, v.FLOATS), limit)
    indices = b.add(v.splat(b, first), ir.Constant(v.INTS, list(range(v.LANES))))
    if v.INSTRUCTIONS.vector_bits == 512:
        listed = v.call(b, "llvm.x86.avx512.mask.compress.v16i32", v.INTS, indices, v.all_lanes(v.INTS, 0), chosen)
        v.store(b, listed, out)
        count = v.call(b, "llvm.ctpop.i16", v.INT16, b.bitcast(chosen, v.INT16))
        return b.zext(count, v.INT64)
    count = v.constant(0)
    for lane in range(v.LANES):
        place = ir.Constant(v.INT32, lane)
        v.store(b, b.extract_element(indices, place), b.add(out, b.shl(count, v.constant(2))))
        count = b.add(count, b.zext(b.extract_element(chosen, place), v.INT64))
    return count


# ---------------------------------------------------------------- passes over all logits


@njit(nogil=True)
def largest_logit(logits):
    """The largest number of a row, float32 (vocab_size,), and whether all are numbers: 0 times NaN or infinity is NaN.

    Several vectors at once, so that none waits for the one before.
    """
    address, whole = logits.ctypes.data, len(logits) // (2 * _VECTOR) * (2 * _VECTOR)
    zero, low = lanes.splat(_float(0.0)), lanes.splat(_float(-np.inf))
    first, second, zeros, more_zeros = low, low, zero, zero
    for place in range(address, address + whole * 4, 128):
        x, y = lanes.load(place), lanes.load(place + 64)
        first, second = lanes.larger(x, first), lanes.larger(y, second)
        zeros, more_zeros = lanes.multiply_add(x, zero, zeros), lanes.multiply_add(y, zero, more_zeros)
    most = lanes.largest(lanes.larger(first, second))
    nothing = lanes.total(lanes.add(zeros, more_zeros))
    for index in range(whole, len(logits)):
        most = max(most, logits[index])
        nothing += logits[index] * _float(0.0)
    return most, nothing == 0


@njit(nogil=True)
def first_largest(logits):
    """Where the largest number stands first, and whether all are numbers."""
    most, are_numbers = largest_logit(logits)
    address, whole = logits.ctypes.data, len(logits) // _VECTOR
    limit, vector = lanes.splat(most), 0
    while vector < whole and not any_above(address + vector * 64, limit):
        vector += 1
    for index in range(vector * _VECTOR, len(logits)):
        if logits[index] == most:
            return index, are_numbers
    return 0, are_numbers


@njit(nogil=True)
def estimate_rests(logits, most, factor, limits):
    """What all tokens weigh, and those below each of three limits: about.

    Args:
        logits: float32 (vocab_size,).
        most: the largest of them, whose token weighs 1.
        factor: 1 / temperature.
        limits: three logits.

    Returns:
        Four sums of exp((logit - most) * factor), off by 8e-6 of themselves.
    """
    address, whole = logits.ctypes.data, len(logits) // _VECTOR
    top, by, none = lanes.splat(most), lanes.splat(_float(factor / math.log(2))), lanes.splat(_float(0.0))
    least = lanes.splat(_float(max(-86.0 / factor, -3e38)))  # what is less weighs nothing in float32
    limit, second_limit, third_limit = lanes.splat(limits[0]), lanes.splat(limits[1]), lanes.splat(limits[2])
    total, rest, second_rest, third_rest = 0.0, 0.0, 0.0, 0.0
    for begin in range(0, whole, _FOLDED):
        all_, first, second, third = none, none, none, none
        for vector in range(begin, min(begin + _FOLDED, whole)):
            x = lanes.load(address + vector * 64)
            weight = estimate_power(lanes.larger(lanes.subtract(x, top), least), by)
            all_ = lanes.add(all_, weight)
            first = lanes.add(first, below(x, limit, weight))
            second = lanes.add(second, below(x, second_limit, weight))
            third = lanes.add(third, below(x, third_limit, weight))
        total += lanes.total(all_)
        rest += lanes.total(first)
        second_rest += lanes.total(second)
        third_rest += lanes.total(third)
    for index in range(whole * _VECTOR, len(logits)):
        weight = exponential((np.float64(logits[index]) - most) * factor)
        total += weight
        rest += weight if logits[index] < limits[0] else 0.0
        second_rest += weight if logits[index] < limits[1] else 0.0
        third_rest += weight if logits[index] < limits[2] else 0.0
    return total, (rest, second_rest, third_rest)


@njit(nogil=True)
def sum_rest(logits, most, factor, limit, buffer):
    """Weights of all logits (float32) below a limit, summed in float64 by blocks; `buffer` has room for one."""
    summed = 0.0
    for begin in range(0, len(logits), BLOCK):
        size = min(BLOCK, len(logits) - begin)
        weigh_block(logits, begin, size, most, factor, buffer)
        for index in range(size):
            buffer[index] = buffer[index] if logits[begin + index] < limit else 0.0
        summed += sum_weights(buffer, 0, size)
    return summed


@njit(nogil=True)
def list_above(logits, limit, ids):
    """Writes the token ids of the logits (float32) that are not below a limit to `ids` (int32); returns how many."""
    address, out, whole, count = logits.ctypes.data, ids.ctypes.data, len(logits) // _VECTOR, 0
    splat = lanes.splat(limit)
    for vector in range(whole):
        count += list_lanes(address + vector * 64, out + count * 4, np.int32(vector * _VECTOR), splat)
    for index in range(whole * _VECTOR, len(logits)):
        ids[count] = index
        count += int(logits[index] >= limit)
    return count


@njit(nogil=True)
def count_above(logits, limit):
    """How many logits are not below a limit."""
    count = 0
    for index in range(len(logits)):
        count += int(logits[index] >= limit)
    return count


# ---------------------------------------------------------------- weights


@njit(nogil=True)
def weigh_block(logits, begin, size, most, factor, weights):
    """Weights, relative to the largest, of logits that stand side by side."""
    for index in range(size):
        weights[index] = exponential((np.float64(logits[begin + index]) - most) * factor)


@njit(nogil=True)
def weigh(logits, ids, count, most, factor, weights):
    """Weights of listed tokens."""
    for index in range(count):
        weights[index] = np.float64(logits[ids[index]])
    for index in range(count):
        weights[index] = exponential((weights[index] - most) * factor)


@njit(nogil=True)
def sum_weights(weights, begin, end):
    """In one order: eight sums side by side, then their sum."""
    a, b, c, d, e, f, g, h = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    whole = begin + (end - begin) // 8 * 8
    for index in range(begin, whole, 8):
        a += weights[index]
        b += weights[index + 1]
        c += weights[index + 2]
        d += weights[index + 3]
        e += weights[index + 4]
        f += weights[index + 5]
        g += weights[index + 6]
        h += weights[index + 7]
    for index in range(whole, end):
        a += weights[index]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))
