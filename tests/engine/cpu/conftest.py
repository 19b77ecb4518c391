"""The compiled forward pass needs instructions that not every CPU has."""

from __future__ import annotations

import pytest

from busllm.engine.cpu.instructions import detect_instructions

NEEDS_KERNELS = (
    "test_inputs",
    "test_linear",
    "test_experts",
    "test_mixture",
    "test_elementwise",
    "test_cpu_attention",
    "test_forward",
    "test_load",
    "test_compiled_scans",
    "test_default_model",
    "test_dispatches",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this CPU cannot run, and gives the first test of a process time to compile.

    The kernels are compiled once per version, since sizes are values to them; what follows is fast.
    """
    supported = detect_instructions() is not None
    for item in items:
        if item.path.parent.name == "cpu" and item.path.stem in NEEDS_KERNELS:
            item.add_marker(pytest.mark.timeout(900))
            if not supported:
                item.add_marker(pytest.mark.skip(reason="this CPU lacks the instructions of the compiled kernels"))
