"""What this CPU's vector instructions are, and whether they are enough for the compiled forward pass.

Owns: the choice among the instruction sets that the kernels are written for.
Does not know: the kernels; imports neither numba nor torch, so that the question costs nothing.
Next on the path: `vectors.py`, which writes the instructions.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from enum import Enum
from typing import assert_never

import llvmlite.binding as llvm
import msgspec

# numba compiles for another CPU than this one when these say so; the kernels must follow.
_CPU_NAME, _CPU_FEATURES = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"


class ByteDot(Enum):
    """How sums of products of bytes are computed."""

    VNNI_512 = "vnni-512"  # vpdpbusd on 512 bits
    VNNI_256 = "vnni-256"  # the same on 256 bits
    MADD_512 = "madd-512"  # vpmaddubsw or vpmaddwd, and vpaddd, on 512 bits
    MADD_256 = "madd-256"  # the same on 256 bits
    NEON_USDOT = "neon-usdot"  # usdot on 128 bits
    NEON_SDOT = "neon-sdot"  # sdot, of 8-bit weights once more for what takes 128 off
    NEON = "neon"  # mla


class Instructions(msgspec.Struct, frozen=True):
    """The instructions that kernels use.

    Attributes:
        cpu: LLVM's name of the CPU.
        features: LLVM's names of what it has, sorted.
        byte_dot: for int8 and int4 weights.
        has_bfloat16_dot: whether pairs of bfloat16 are multiplied and added by one instruction (else by shifts and
            float32 products).
    """

    cpu: str
    features: tuple[str, ...]
    byte_dot: ByteDot
    has_bfloat16_dot: bool

    @property
    def vector_bits(self) -> int:
        """Width of a register."""
        match self.byte_dot:
            case ByteDot.VNNI_512 | ByteDot.MADD_512:
                return 512
            case ByteDot.VNNI_256 | ByteDot.MADD_256:
                return 256
            case ByteDot.NEON_USDOT | ByteDot.NEON_SDOT | ByteDot.NEON:
                return 128
            case _:
                assert_never(self.byte_dot)

    @property
    def label(self) -> str:
        """For people and logs."""
        return self.byte_dot.value + ("+bf16" if self.has_bfloat16_dot else "")


def detect_instructions(environment: Mapping[str, str] = os.environ) -> Instructions | None:
    """What the CPU that numba compiles for can do; None when the kernels cannot run on it.

    Args:
        environment: may hold `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES`, by which numba compiles for another CPU.
    """
    cpu = environment.get(_CPU_NAME) or llvm.get_host_cpu_name()
    written = environment.get(_CPU_FEATURES)
    if written is None:
        has = {name for name, present in llvm.get_host_cpu_features().items() if present}
    else:
        has = {entry[1:] for entry in written.split(",") if entry.startswith("+")}
    byte_dot = choose_byte_dot(platform.machine(), has)
    if byte_dot is None:
        return None
    is_wide = byte_dot in (ByteDot.VNNI_512, ByteDot.MADD_512)
    return Instructions(cpu, tuple(sorted(has)), byte_dot, is_wide and "avx512bf16" in has)


def choose_byte_dot(machine: str, has: set[str]) -> ByteDot | None:
    """The widest way to multiply bytes; None = none that is written for.

    Args:
        machine: as `platform.machine` names it.
        has: LLVM's names of the CPU's features.
    """
    if machine in ("aarch64", "arm64"):
        if "neon" not in has:
            return None
        return ByteDot.NEON_USDOT if "i8mm" in has else ByteDot.NEON_SDOT if "dotprod" in has else ByteDot.NEON
    if machine not in ("x86_64", "AMD64") or not {"avx2", "fma", "f16c"} <= has:
        return None
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= has:
        return ByteDot.VNNI_512 if "avx512vnni" in has else ByteDot.MADD_512
    return ByteDot.VNNI_256 if "avxvnni" in has else ByteDot.MADD_256
