"""Which instructions are chosen for which CPU."""

from __future__ import annotations

import platform

import pytest

from busllm.engine.cpu.instructions import ByteDot, choose_byte_dot, detect_instructions

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", AVX512 | {"avx512vnni"}, ByteDot.VNNI_512),
        ("x86_64", AVX512, ByteDot.MADD_512),
        ("x86_64", AVX512 - {"avx512bw"}, ByteDot.MADD_256),
        ("x86_64", AVX2 | {"avxvnni"}, ByteDot.VNNI_256),
        ("x86_64", AVX2, ByteDot.MADD_256),
        ("x86_64", AVX2 - {"fma"}, None),
        ("x86_64", {"sse4.2"}, None),
        ("aarch64", {"neon", "dotprod", "i8mm"}, ByteDot.NEON_USDOT),
        ("aarch64", {"neon", "dotprod"}, ByteDot.NEON_SDOT),
        ("aarch64", {"neon"}, ByteDot.NEON),
        ("aarch64", {"dotprod", "i8mm"}, None),
        ("aarch64", set(), None),
        ("riscv64", {"v"}, None),
    ],
)
def test_the_widest_instructions_that_a_cpu_has_are_chosen(
    machine: str, features: set[str], expected: ByteDot | None
) -> None:
    assert choose_byte_dot(machine, features) is expected


@pytest.mark.skipif(platform.machine() != "x86_64", reason="features of x86")
def test_the_features_that_the_compiler_is_told_of_replace_those_of_this_cpu() -> None:
    features = ",".join(f"+{name}" for name in sorted(AVX2)) + ",-avx512f"
    instructions = detect_instructions({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features})
    assert instructions is not None
    assert (instructions.cpu, instructions.byte_dot) == ("haswell", ByteDot.MADD_256)
    assert not instructions.has_bfloat16_dot
    assert detect_instructions({"NUMBA_CPU_NAME": "nocona", "NUMBA_CPU_FEATURES": "+sse2"}) is None
