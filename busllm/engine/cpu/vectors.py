"""Vectors of 16 numbers in LLVM, with the instructions that the CPU has.

Owns: loads, stores, splats, dot products and the exponential on vectors of 16; LLVM cuts them into registers where
these are narrower, and only the dot products are cut here, since their instructions have a fixed width.
Does not know: what is computed. Every operation is exact or rounds in a fixed order, so nothing here makes a row depend
on another.
Next on the path: `tiles.py` (products of matrices), `lanes.py` (the same for code that numba compiles).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

import llvmlite.ir as ir
import numba
from numba.core import cgutils

from busllm.engine.cpu.instructions import ByteDot, Instructions, detect_instructions
from busllm.errors import EngineError

if not numba.config.CACHE_DIR:
    raise EngineError("prepare_kernels() comes first: else numba keeps kernels where changes go unseen")

LANES = 16
LARGEST_BFLOAT16 = 3.3895313892515355e38
HALF, FLOAT, INT8, INT16, INT32, INT64 = (
    ir.HalfType(),
    ir.FloatType(),
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
)
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT32, LANES)
HALVES = ir.VectorType(HALF, LANES)
SHORTS = ir.VectorType(INT16, LANES)
BYTES = ir.VectorType(INT8, LANES)

Builder = Any  # ir.IRBuilder; llvmlite has no types
Value = Any  # ir.Value


def _supported() -> Instructions:
    instructions = detect_instructions()
    if instructions is None:
        raise EngineError("this CPU has no instructions that the compiled forward pass is written for; use 'torch'")
    return instructions


INSTRUCTIONS = _supported()


def constant(value: int) -> Value:
    """An int64 constant."""
    return ir.Constant(INT64, value)


def all_lanes(kind: Value, value: float) -> Value:
    """A constant vector."""
    return ir.Constant(kind, [value] * LANES)


def call(b: Builder, name: str, result: Value, *arguments: Value) -> Value:
    """Calls an LLVM intrinsic."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def at(b: Builder, address: Value, num_bytes: Value | int) -> Value:
    """address + num_bytes."""
    return b.add(address, constant(num_bytes) if isinstance(num_bytes, int) else num_bytes)


def load(b: Builder, address: Value, kind: Value, align: int = 4) -> Value:
    """Reads a value of any type."""
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(b: Builder, value: Value, address: Value, align: int = 4) -> None:
    """Writes a value of any type."""
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = align


def splat(b: Builder, scalar: Value) -> Value:
    """The same number in all lanes."""
    kind = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(kind, ir.Undefined)
    one = b.insert_element(undefined, scalar, ir.Constant(INT32, 0))
    return b.shuffle_vector(one, undefined, ir.Constant(INTS, [0] * LANES))


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x * y + z, rounded once."""
    return call(b, "llvm.fma.v16f32", FLOATS, x, y, z)


def exponential(b: Builder, x: Value) -> Value:
    """e^x for x <= 0; exactly 0 below -87, and for -inf.

    2^n times a polynomial of degree 6 (Taylor, on [-ln 2 / 2, ln 2 / 2]); relative error below 3e-7.
    """
    lowest = all_lanes(FLOATS, -87.0)
    is_zero = b.fcmp_unordered("<", x, lowest)
    scaled = b.fmul(b.select(is_zero, lowest, x), all_lanes(FLOATS, 1.4426950408889634))
    whole = call(b, "llvm.rint.v16f32", FLOATS, scaled)
    rest = b.fmul(b.fsub(scaled, whole), all_lanes(FLOATS, 0.6931471805599453))
    result = all_lanes(FLOATS, 1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        result = fma(b, result, rest, all_lanes(FLOATS, coefficient))
    exponent = b.shl(b.add(b.fptosi(whole, INTS), all_lanes(INTS, 127)), all_lanes(INTS, 23))
    return b.select(is_zero, all_lanes(FLOATS, 0.0), b.fmul(result, b.bitcast(exponent, FLOATS)))


def to_bfloat16(b: Builder, x: Value) -> Value:
    """Rounds to the nearest bfloat16, ties to even: 16 x i16."""
    bits = b.bitcast(x, INTS)
    odd = b.and_(b.lshr(bits, all_lanes(INTS, 16)), all_lanes(INTS, 1))
    rounded = b.add(bits, b.add(odd, all_lanes(INTS, 0x7FFF)))
    return b.trunc(b.lshr(rounded, all_lanes(INTS, 16)), SHORTS)


def widen_half(b: Builder, address: Value) -> Value:
    """Reads 16 float16 as float32."""
    return b.fpext(load(b, address, HALVES, 32), FLOATS)


def add_bytes(b: Builder, x: Value, y: Value) -> Value:
    """x + y in each byte of 16 x i32."""
    kind = ir.VectorType(INT8, 4 * LANES)
    return b.bitcast(b.add(b.bitcast(x, kind), b.bitcast(y, kind)), INTS)


# ---------------------------------------------------------------- dot products


def dot_bytes(b: Builder, total: Value, x: Value, y: Value, *, is_small: bool) -> Value:
    """total + the sums of four products of bytes, per lane of int32; exact.

    Args:
        total: 16 x i32.
        x: 16 x i32, four uint8 in each.
        y: 16 x i32, four int8 in each.
        is_small: all of x are below 128, so any sum of two products fits into int16.
    """
    match INSTRUCTIONS.byte_dot:
        case ByteDot.VNNI_512:
            return call(b, "llvm.x86.avx512.vpdpbusd.512", INTS, total, x, y)
        case ByteDot.VNNI_256:
            name = "llvm.x86.avx512.vpdpbusd.256"
            return _in_parts(b, 2, lambda t, p, q: call(b, name, t.type, t, p, q), total, x, y)
        case ByteDot.MADD_512:
            by_two, by_four = "llvm.x86.avx512.pmaddw.d.512", "llvm.x86.avx512.pmaddubs.w.512"
            return b.add(total, _multiplied_bytes(b, by_two, by_four, x, y, is_small))
        case ByteDot.MADD_256:
            by_two, by_four = "llvm.x86.avx2.pmadd.wd", "llvm.x86.avx2.pmadd.ub.sw"
            products = _in_parts(b, 2, lambda p, q: _multiplied_bytes(b, by_two, by_four, p, q, is_small), x, y)
            return b.add(total, products)
        case ByteDot.NEON_USDOT:
            return _in_parts(b, 4, lambda *of: _neon_dot(b, "usdot", *of), total, x, y)
        case ByteDot.NEON_SDOT if is_small:
            return _in_parts(b, 4, lambda *of: _neon_dot(b, "sdot", *of), total, x, y)
        case ByteDot.NEON_SDOT:  # x · y = (x - 128) · y + 128 · y
            less = b.xor(x, all_lanes(INTS, -0x7F7F7F80))
            total = _in_parts(b, 4, lambda *of: _neon_dot(b, "sdot", *of), total, less, y)
            ones, zeros = all_lanes(INTS, 0x01010101), all_lanes(INTS, 0)
            sums = _in_parts(b, 4, lambda *of: _neon_dot(b, "sdot", *of), zeros, ones, y)
            return b.add(total, b.shl(sums, all_lanes(INTS, 7)))
        case ByteDot.NEON:
            for byte in range(4):
                up = all_lanes(INTS, 24 - 8 * byte)
                unsigned, signed = (shift(b.shl(z, up), all_lanes(INTS, 24)) for shift, z in ((b.lshr, x), (b.ashr, y)))
                total = b.add(total, b.mul(unsigned, signed))
            return total
        case _:
            assert_never(INSTRUCTIONS.byte_dot)


def _neon_dot(b: Builder, name: str, total: Value, x: Value, y: Value) -> Value:
    """4 x i32 each; `usdot` takes the bytes of x without a sign, `sdot` with."""
    kind = ir.VectorType(INT8, 16)
    of_bytes = (b.bitcast(value, kind) for value in (x, y))
    return call(b, f"llvm.aarch64.neon.{name}.v4i32.v16i8", total.type, total, *of_bytes)


def fetch(b: Builder, address: Value) -> None:
    """Asks for a cache line that will be read soon."""
    pointer = b.inttoptr(address, ir.PointerType(INT8))
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(INT8), INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    is_read, to_second_level, is_data = (ir.Constant(INT32, value) for value in (0, 2, 1))
    b.call(function, [pointer, is_read, to_second_level, is_data])


def dot_pairs(b: Builder, total: Value, x: Value, y: Value) -> Value:
    """total + the sums of two products of bfloat16, per lane of float32.

    Args:
        total: 16 x f32.
        x, y: 16 x i32, two bfloat16 in each, the first in the lower half.
    """
    if INSTRUCTIONS.has_bfloat16_dot:
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, x, y)
    for half in (_lower_halves, _upper_halves):
        total = fma(b, half(b, x), half(b, y), total)
    return total


def _lower_halves(b: Builder, pairs: Value) -> Value:
    return b.bitcast(b.shl(pairs, all_lanes(INTS, 16)), FLOATS)


def _upper_halves(b: Builder, pairs: Value) -> Value:
    return b.bitcast(b.and_(pairs, all_lanes(INTS, -65536)), FLOATS)


def _multiplied_bytes(b: Builder, by_two: str, by_four: str, x: Value, y: Value, is_small: bool) -> Value:
    """Sums of four products of uint8 and int8, by the names of the instructions that multiply shorts and bytes."""
    shorts, bytes_ = (ir.VectorType(kind, n * x.type.count) for kind, n in ((INT16, 2), (INT8, 4)))
    if is_small:
        pairs = call(b, by_four, shorts, b.bitcast(x, bytes_), b.bitcast(y, bytes_))
        return call(b, by_two, x.type, pairs, ir.Constant(shorts, [1] * shorts.count))
    eight = ir.Constant(shorts, [8] * shorts.count)
    x, y = b.bitcast(x, shorts), b.bitcast(y, shorts)
    even = call(b, by_two, y_type := _ints(x), b.lshr(b.shl(x, eight), eight), b.ashr(b.shl(y, eight), eight))
    return b.add(even, call(b, by_two, y_type, b.lshr(x, eight), b.ashr(y, eight)))


def _ints(shorts: Value) -> Value:
    """The type of int32 that holds as many bits as a vector of int16."""
    return ir.VectorType(INT32, shorts.type.count // 2)


def _in_parts(b: Builder, count: int, operation: Callable[..., Value], *operands: Value) -> Value:
    """Does an operation on 16 / count lanes so many times; `count` is a power of two."""
    lanes, parts = LANES // count, []
    for first in range(0, LANES, lanes):
        mask = ir.Constant(ir.VectorType(INT32, lanes), list(range(first, first + lanes)))
        cut = [b.shuffle_vector(operand, ir.Constant(operand.type, ir.Undefined), mask) for operand in operands]
        parts.append(operation(*cut))
    while len(parts) > 1:
        lanes *= 2
        mask = ir.Constant(ir.VectorType(INT32, lanes), list(range(lanes)))
        parts = [b.shuffle_vector(*pair, mask) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
