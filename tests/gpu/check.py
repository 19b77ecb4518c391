"""All that needs a CUDA device, in one run: what is installed, the tests, the throughput.

    python -m tests.gpu.check

It installs and downloads nothing, and needs no plug-in of pytest, so it runs in an environment that is there already.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
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


def main() -> int:
    """0 when the tests passed and the measurement ran; 2 when this environment or machine cannot."""
    missing = missing_packages()
    if missing:
        print(f"{sys.executable} lacks: {', '.join(missing)}. The extras busllm[cuda,test] bring them.")
        return 2
    import pytest
    import torch

    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} of {sys.executable} finds no CUDA device.")
        return 2
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES.values())
    print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {versions}")
    # Without the project's pytest settings: they name plug-ins that may not be here.
    tests = str(Path(__file__).parent)
    failed = pytest.main([tests, "-c", "/dev/null", "--rootdir", ".", "-q", "-p", "no:cacheprovider", "--durations=5"])
    from bench.gpu_throughput import main as measure

    measure([])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
