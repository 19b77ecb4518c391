"""`make gpu-check` runs where nothing but the packages that it names is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest
import torch

from tests.gpu.check import PACKAGES

IMPORTS = """
import importlib.abc, sys

absent = set({absent!r})

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in absent:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import bench.gpu_throughput, tests.gpu.check, tests.gpu.conftest, tests.gpu.test_attention, tests.gpu.test_forward
import torch
from busllm.testing.engine_driver import sequence_request

runner = tests.gpu.test_forward.runner(tests.gpu.test_forward.SMALL_LLAMA, "torch", torch.device("cpu"))
engine = tests.gpu.test_forward.Engine(runner, tests.gpu.test_forward.EngineConfig(num_pages=8))
for index, params in enumerate(tests.gpu.test_forward.SAMPLED):
    engine.submit(sequence_request(str(index), [1, 2], params))
while engine.has_work:
    engine.step()
print(sorted(absent & sys.modules.keys()))
"""


def with_requirements(names: set[str]) -> set[str]:
    """Distributions and all that they cannot do without, as far as they are installed."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:  # for another platform, or not installed here
            continue
        waiting += [
            re.sub(r"[-_.]+", "-", match[0]).lower()
            for line in needed
            if "extra ==" not in line and (match := re.match(r"[\w.-]+", line))
        ]
    return found


def test_it_uses_no_package_that_it_does_not_name() -> None:
    present = with_requirements(set(PACKAGES.values()))
    installed = packages_distributions()
    absent = {
        module
        for module, names in installed.items()
        if not any(re.sub(r"[-_.]+", "-", name).lower() in present for name in names)
    } - {"busllm", "tests", "bench"}
    assert {"llvmlite", "numba", "transformers", "tokenizers"} & installed.keys() <= absent
    code = IMPORTS.format(absent=sorted(absent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["tests.gpu.check"], ["What needs one is skipped.", "there is no CUDA device"]),
        (["tests.gpu.check", "--device"], ["What needs one is skipped."]),
        (["bench.gpu_throughput"], ["finds no CUDA device; nothing is measured."]),
    ],
)
def test_without_a_device_it_says_so_and_ends_with_2(command: list[str], words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert all(word in done.stdout + done.stderr for word in words)
    assert "Traceback" not in done.stderr
    assert "flashinfer" not in done.stdout, "nobody needs to install it here"
