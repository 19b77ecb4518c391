"""All that needs a CUDA device, in one run: what is installed, the tests, the throughput.

    python -m tests.gpu.check [--device]

It looks for a device before anything else. It installs and downloads nothing, and needs no plug-in of pytest, so it
runs in an environment that is there already.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGES = {
    "torch": "torch",
    "flashinfer": "flashinfer-python",
    "pytest": "pytest",
    "numpy": "numpy",
    "msgspec": "msgspec",
    "structlog": "structlog",
}


def missing_packages() -> list[str]:
    """Distributions that the check needs and the environment lacks."""
    return [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]


def main(arguments: Sequence[str]) -> int:
    """Checks everything; with `--device` only whether there is a device.

    Returns:
        0 when the tests passed and the measurement ran; 2 when this machine or environment cannot.
    """
    reason = why_no_device()
    if reason is not None:
        print(f"{reason} What needs one is skipped.")
        if importlib.util.find_spec("pytest") is not None:
            run_tests("-rs")
        return 2
    if "--device" in arguments:
        return 0
    missing = missing_packages()
    if missing:
        print(f"{sys.executable} lacks: {', '.join(missing)}. The extras busllm[cuda,test] bring them.")
        return 2
    import torch

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES.values())
    print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {versions}")
    failed = run_tests("--durations=5")
    from bench.gpu_throughput import main as measure

    return failed or measure([])


def why_no_device() -> str | None:
    """Words for a machine without a CUDA device, or for a torch that cannot use it; None = there is one."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch, which would find a CUDA device."
    import torch

    if torch.cuda.is_available():
        return None
    built = "is built for CPUs" if torch.version.cuda is None else "finds no CUDA device"
    return f"torch {torch.__version__} of {sys.executable} {built}."


def run_tests(*options: str) -> int:
    """Runs the tests of this folder; returns pytest's exit status."""
    import pytest

    # Without the project's pytest settings: they name plug-ins that may not be here.
    tests = [str(path) for path in sorted(Path(__file__).parent.glob("test_*.py")) if path.stem != "test_check"]
    return int(pytest.main([*tests, "-c", "/dev/null", "--rootdir", ".", "-q", "-p", "no:cacheprovider", *options]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
