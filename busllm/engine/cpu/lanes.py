"""Vectors of 16 numbers as a type of numba's, for the kernels that are written in Python.

Owns: the type `float32x16` and its operations. Sums over lanes add in one fixed order, so they do not depend on how a
loop around them was compiled.
Does not know: what is computed; the instructions are in `vectors.py`.
Next on the path: `elementwise.py`, `attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from busllm.engine.cpu import vectors as v
from busllm.engine.cpu.compiled import from_llvm


class Float32x16(types.Type):
    """16 float32 in registers; lives in local variables only."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


@register_model(Float32x16)
class Float32x16Model(models.PrimitiveModel):
    """What LLVM sees of `Float32x16`."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, v.FLOATS)


float32x16 = Float32x16()
_address, _float, _int32 = types.int64, types.float32, types.int32


@from_llvm(float32x16, _address)
def load(b, address):
    """16 float32 from an address."""
    return v.load(b, address, v.FLOATS)


@from_llvm(types.void, _address, float32x16)
def store(b, address, x):
    """16 float32 to an address."""
    v.store(b, x, address)


@from_llvm(float32x16, _float)
def splat(b, x):
    """The same number in all lanes."""
    return v.splat(b, x)


@from_llvm(float32x16, float32x16, float32x16)
def add(b, x, y):
    """x + y."""
    return b.fadd(x, y)


@from_llvm(float32x16, float32x16, float32x16)
def subtract(b, x, y):
    """x - y."""
    return b.fsub(x, y)


@from_llvm(float32x16, float32x16, float32x16)
def multiply(b, x, y):
    """x * y."""
    return b.fmul(x, y)


@from_llvm(float32x16, float32x16, float32x16, float32x16)
def multiply_add(b, x, y, z):
    """x * y + z, rounded once."""
    return v.fma(b, x, y, z)


@from_llvm(float32x16, float32x16, float32x16)
def larger(b, x, y):
    """The larger of each pair of numbers."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@from_llvm(float32x16, float32x16, float32x16)
def smaller(b, x, y):
    """The smaller of each pair of numbers."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@from_llvm(float32x16, float32x16)
def exponential(b, x):
    """e^x for x <= 0."""
    return v.exponential(b, x)


@from_llvm(float32x16, float32x16)
def sigmoid(b, x):
    """1 / (1 + e^-x), by the exponential of -|x|."""
    one = v.all_lanes(v.FLOATS, 1.0)
    small = v.exponential(b, b.fneg(v.call(b, "llvm.fabs.v16f32", v.FLOATS, x)))
    above = b.fdiv(one, b.fadd(one, small))
    is_positive = b.fcmp_ordered(">=", x, v.all_lanes(v.FLOATS, 0.0))
    return b.select(is_positive, above, b.fmul(small, above))


@from_llvm(float32x16, float32x16, _int32, _int32)
def keep_between(b, x, low, high):
    """Lanes low … high - 1 of x, -inf in the others; both may lie outside of 0 … 16."""
    lanes = ir.Constant(v.INTS, list(range(v.LANES)))
    is_kept = b.and_(
        b.icmp_signed(">=", lanes, v.splat(b, low)),
        b.icmp_signed("<", lanes, v.splat(b, high)),
    )
    return b.select(is_kept, x, v.all_lanes(v.FLOATS, float("-inf")))


@from_llvm(_float, float32x16)
def largest(b, x):
    """The largest lane."""
    return _halved(b, x, lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q))


@from_llvm(_float, float32x16)
def smallest(b, x):
    """The smallest lane."""
    return _halved(b, x, lambda p, q: b.select(b.fcmp_ordered("<", p, q), p, q))


@from_llvm(_float, float32x16)
def total(b, x):
    """The sum of the lanes."""
    return _halved(b, x, b.fadd)


def _halved(b: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combines the two halves until one number is left."""
    size = v.LANES
    while size > 1:
        size //= 2
        first, second = (
            b.shuffle_vector(
                x, ir.Constant(x.type, ir.Undefined), ir.Constant(ir.VectorType(v.INT32, size), list(half))
            )
            for half in (range(size), range(size, 2 * size))
        )
        x = combine(first, second)
    return b.extract_element(x, ir.Constant(v.INT32, 0))


@from_llvm(float32x16, _address, float32x16)
def store_bfloat16(b, address, x):
    """Rounds to bfloat16 and writes 32 bytes; returns the rounded numbers."""
    rounded = v.to_bfloat16(b, x)
    v.store(b, rounded, address, 2)
    wide = b.shl(b.zext(rounded, v.INTS), v.all_lanes(v.INTS, 16))
    return b.bitcast(wide, v.FLOATS)


@from_llvm(float32x16, _address, float32x16)
def store_int8(b, address, x):
    """Rounds to the nearest int8 (ties to even), writes 16 bytes; returns the integers. x must be in -128 … 127; of NaN
    any byte is written and NaN returned.
    """
    whole = v.call(b, "llvm.rint.v16f32", v.FLOATS, x)
    v.store(b, b.trunc(b.fptosi(whole, v.INTS), v.BYTES), address, 1)
    return whole


@from_llvm(types.void, _address, _address, types.int64)
def copy(b, to, source, num_bytes):
    """Copies bytes."""
    bytes_at = ir.PointerType(v.INT8)
    is_volatile = ir.Constant(ir.IntType(1), 0)
    kind = ir.FunctionType(ir.VoidType(), [bytes_at, bytes_at, v.INT64, ir.IntType(1)])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.memcpy.p0.p0.i64")
    b.call(function, [b.inttoptr(to, bytes_at), b.inttoptr(source, bytes_at), num_bytes, is_volatile])


@from_llvm(types.uint16, _float)
def bfloat16_bits(b, x):
    """Rounds one number to bfloat16, NaN to 0 and infinities to the largest number.

    So the cache holds numbers only, and what a masked key or an old one leaves there counts nothing when its weight
    is 0. (Written for one number: the compiler makes vectors of a loop around it.)
    """
    most, zero = ir.Constant(v.FLOAT, v.LARGEST_BFLOAT16), ir.Constant(v.FLOAT, 0.0)
    x = b.select(b.fcmp_unordered("uno", x, x), zero, x)
    x = b.select(b.fcmp_ordered(">", x, most), most, x)
    least = ir.Constant(v.FLOAT, -v.LARGEST_BFLOAT16)
    x = b.select(b.fcmp_ordered("<", x, least), least, x)
    bits, sixteen = b.bitcast(x, v.INT32), ir.Constant(v.INT32, 16)
    odd = b.and_(b.lshr(bits, sixteen), ir.Constant(v.INT32, 1))
    rounded = b.add(bits, b.add(odd, ir.Constant(v.INT32, 0x7FFF)))
    return b.trunc(b.lshr(rounded, sixteen), v.INT16)
