"""The numbers of the kernels with fewer instructions than this CPU has: what older CPUs compute."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

AVX2 = {"avx", "avx2", "fma", "f16c", "sse4.2", "ssse3", "popcnt", "bmi", "bmi2"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
VNNI = AVX512 | {"avx512vnni"}
KINDS = {"AVX2": ("haswell", AVX2), "AVX-512": ("skylake-avx512", AVX512), "AVX-512 with VNNI": ("cascadelake", VNNI)}
FILES = ("test_inputs", "test_linear", "test_cpu_attention", "test_elementwise", "test_compiled_scans", "test_experts")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86")
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_pass_their_tests(kind: str) -> None:
    cpu, features = KINDS[kind]
    here = {name for name, present in llvm.get_host_cpu_features().items() if present}
    if not features <= here:
        pytest.skip(f"this CPU lacks {features - here}")
    hidden = {name for name in here - features if name.startswith("avx")}
    entries = [*(f"+{name}" for name in sorted(features)), *(f"-{name}" for name in sorted(hidden))]
    environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ",".join(entries)}
    files = [str(Path(__file__).with_name(f"{name}.py")) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert " skipped" not in done.stdout.splitlines()[-1]
