"""What the cores can: bytes read per second, multiply-adds per second of the instructions that the pass uses.

Owns: loops that do nothing else, made by the same compiler from the same instructions as the pass. Everything is the
best of several runs, since what disturbs only slows.
Does not know: what a step needs (`work.py`).

An instruction's loop has its sums and one operand in registers and reads the other from the first-level cache, at
another place each time, so that the compiler can neither leave it out nor move it out of the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils

from bench.limits.work import Product
from busllm.engine.cpu import vectors as v
from busllm.engine.cpu.compiled import from_llvm
from busllm.engine.cpu.pack import aligned_zeros
from busllm.engine.cpu.shapes import VECTOR

# Sums in registers: enough that none waits for its own last product, few enough that they fit.
_NUM_SUMS = 12 if v.INSTRUCTIONS.vector_bits == 512 else 5
_LINES = 64  # of 64 bytes, a power of two: within the first-level cache
_MULTIPLIES = 2_000_000  # per run, some milliseconds
_RUNS = 20
_READ_BYTES = 512 * 2**20  # beyond any cache
_READ_VECTORS = 4  # of 64 bytes at a time
_PIECES = 64

_INSTRUCTIONS: dict[Product, tuple[Callable[..., Any], Any, int]] = {
    Product.INT8: (partial(v.dot_bytes, is_small=True), v.INTS, 4),
    Product.BFLOAT16: (v.dot_pairs, v.FLOATS, 2),
}  # of a kind of states: the instruction, what it adds up, products per lane


def multiply_adds_per_s(kind: Product, num_threads: int) -> float:
    """Of so many cores together, which may share what a core has."""
    _, _, per_lane = _INSTRUCTIONS[kind]
    run = _loop(kind)
    ones = aligned_zeros((_NUM_SUMS + _LINES, 32), np.uint16)
    ones[:] = 0x3F80  # 1.0 in bfloat16; as integers any numbers
    address, rounds = ones.ctypes.data, _MULTIPLIES // _NUM_SUMS
    taken_s = _fastest_s(lambda: run(address, rounds, num_threads), num_threads)
    return num_threads * _NUM_SUMS * rounds * VECTOR * per_lane / taken_s


def read_bytes_per_s(num_threads: int) -> float:
    """Of so many cores together, one long array after the other end."""
    array = aligned_zeros((_READ_BYTES // 8,), np.int64)
    array[:] = 1  # zeros that were never written are one page
    return array.nbytes / _fastest_s(lambda: _read_all(array.ctypes.data, array.nbytes), num_threads)


def _fastest_s(run: Callable[[], Any], num_threads: int) -> float:
    before = numba.get_num_threads()
    numba.set_num_threads(num_threads)
    try:
        run()  # compiles
        times_s = []
        for _ in range(_RUNS):
            began_s = time.perf_counter()
            run()
            times_s.append(time.perf_counter() - began_s)
        return min(times_s)
    finally:
        numba.set_num_threads(before)


@from_llvm(types.float32, types.int64, types.int64)
def _read(b: Any, address: Any, num_bytes: Any) -> Any:
    """Reads memory from its beginning to its end, 256 bytes at a time."""
    totals = [cgutils.alloca_once_value(b, v.all_lanes(v.INTS, 0)) for _ in range(_READ_VECTORS)]
    with cgutils.for_range(b, b.udiv(num_bytes, v.constant(64 * _READ_VECTORS)), intp=v.INT64) as loop:
        first = v.at(b, address, b.mul(loop.index, v.constant(64 * _READ_VECTORS)))
        for index, total in enumerate(totals):
            b.store(b.xor(b.load(total), v.load(b, v.at(b, first, 64 * index), v.INTS, 64)), total)
    return _folded(b, totals, b.xor)


@njit(nogil=True, parallel=True)
def _read_all(address: Any, num_bytes: Any) -> Any:
    """The same by all threads, each its pieces."""
    totals = np.zeros(_PIECES, np.float32)
    each = num_bytes // _PIECES
    for piece in prange(_PIECES):
        totals[piece] = _read(address + piece * each, each)
    return totals.sum()


def _loop(kind: Product) -> Any:
    """A compiled function of (address of _NUM_SUMS + _LINES vectors, rounds, how many cores do it)."""
    dot, summed, _ = _INSTRUCTIONS[kind]

    @from_llvm(types.float32, types.int64, types.int64)
    def multiply(b: Any, address: Any, rounds: Any) -> Any:
        operands = [v.load(b, v.at(b, address, 64 * index), v.INTS, 64) for index in range(_NUM_SUMS)]
        totals = [cgutils.alloca_once(b, summed) for _ in range(_NUM_SUMS)]
        for total, operand in zip(totals, operands, strict=True):
            b.store(b.bitcast(operand, summed), total)
        with cgutils.for_range(b, rounds, intp=v.INT64) as loop:
            line = b.and_(loop.index, v.constant(_LINES - 1))
            place = b.mul(b.add(line, v.constant(_NUM_SUMS)), v.constant(64))
            other = v.load(b, v.at(b, address, place), v.INTS, 64)
            for total, operand in zip(totals, operands, strict=True):
                b.store(dot(b, b.load(total), operand, other), total)
        return _folded(b, totals, b.fadd if summed is v.FLOATS else b.add)

    @njit(nogil=True, parallel=True)
    def run(address: Any, rounds: Any, times: Any) -> Any:
        totals = np.zeros(times, np.float32)
        for index in prange(times):
            totals[index] = multiply(address, rounds)
        return totals.sum()

    return run


def _folded(b: Any, totals: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """A number that depends on all sums, or the compiler would leave them out."""
    folded = b.load(totals[0])
    for total in totals[1:]:
        folded = combine(folded, b.load(total))
    return b.extract_element(b.bitcast(folded, v.FLOATS), ir.Constant(v.INT32, 0))
