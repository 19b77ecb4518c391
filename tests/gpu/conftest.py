"""Everything here needs a CUDA device; without one it is skipped, with the reason."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """`make gpu-check` runs without the project's pytest settings, which need plug-ins."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device; run by `make gpu-check`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
