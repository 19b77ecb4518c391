"""From the topology's words to an engine: what cannot be is said in its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from busllm.errors import ConfigError
from busllm.model_store.resolve import resolve
from busllm.stages.scheduler.build_engine import build_engine
from busllm.testing.tiny_model import write_tiny_model
from busllm.topology.config import ModelConfig, SchedulerConfig


@pytest.mark.parametrize("sizes", [{"kv_tokens": 2**40}, {"kv_memory": "300TiB"}])
@pytest.mark.parametrize("attention", ["cpu", "torch"])
def test_a_cache_larger_than_the_host_names_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str, sizes: dict[str, Any]
) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "false")  # the cores are not this engine's
    directory = write_tiny_model(tmp_path / "llama", "llama")
    (key,) = sizes
    scheduler = SchedulerConfig(device="cpu", attention=attention, **sizes)
    with pytest.raises(ConfigError, match="more memory than this host") as caught:
        build_engine(resolve(str(directory)), ModelConfig(source=str(directory), quantization="none"), scheduler)
    assert caught.value.key == f"scheduler.{key}"
