"""Which instructions are chosen for which CPU."""

from __future__ import annotations

import platform

import pytest

from busllm.engine.cpu.instructions import ShortDot, choose_short_dot, detect_instructions

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", AVX512 | {"avx512vnni"}, ShortDot.VNNI_512),
        ("x86_64", AVX512, ShortDot.MADD_512),
        ("x86_64", AVX512 - {"avx512bw"}, ShortDot.MADD_256),
        ("x86_64", AVX2 | {"avxvnni"}, ShortDot.VNNI_256),
        ("x86_64", AVX2, ShortDot.MADD_256),
        ("x86_64", AVX2 - {"fma"}, None),
        ("x86_64", {"sse4.2"}, None),
        ("aarch64", {"neon"}, ShortDot.NEON),
        ("aarch64", set(), None),
        ("riscv64", {"v"}, None),
    ],
)
def test_the_widest_instructions_that_a_cpu_has_are_chosen(
    machine: str, features: set[str], expected: ShortDot | None
) -> None:
    assert choose_short_dot(machine, features) is expected


@pytest.mark.skipif(platform.machine() != "x86_64", reason="features of x86")
def test_the_features_that_the_compiler_is_told_of_replace_those_of_this_cpu() -> None:
    features = ",".join(f"+{name}" for name in sorted(AVX2)) + ",-avx512f"
    instructions = detect_instructions({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features})
    assert instructions is not None
    assert (instructions.cpu, instructions.short_dot) == ("haswell", ShortDot.MADD_256)
    assert not instructions.has_bfloat16_dot
    assert detect_instructions({"NUMBA_CPU_NAME": "nocona", "NUMBA_CPU_FEATURES": "+sse2"}) is None
