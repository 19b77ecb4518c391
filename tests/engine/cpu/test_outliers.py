"""Inputs that are kept apart: found by what a model does, kept with its packed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from busllm.engine.cpu.kernels import prepare_kernels
from busllm.engine.cpu.packed_model import PackedModel
from busllm.engine.loader import LoadConfig, load_runner
from busllm.testing.tiny_model import write_tiny_model

prepare_kernels()

from busllm.engine.cpu.outliers import largest  # noqa: E402

CHANNEL = 37
LINEARS = ("queries_keys_values", "attention_output", "gate_up", "down")


@pytest.fixture
def model_with_one_large_channel(tmp_path: Path) -> Path:
    folder = write_tiny_model(tmp_path / "model", "llama")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    (name,) = (name for name in tensors if name.endswith("layers.1.input_layernorm.weight"))
    tensors[name][CHANNEL] *= 100
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def packed(folder: Path, quantization: Literal["none", "int8", "int4"]) -> PackedModel:
    runner = load_runner(str(folder), LoadConfig(device="cpu", attention="cpu", quantization=quantization))
    found = runner._decoder._packed  # type: ignore[attr-defined]
    assert isinstance(found, PackedModel)
    return found


def test_the_largest_peaks_are_chosen_and_of_equals_the_first() -> None:
    peaks = np.ones(40, np.float32)
    peaks[[33, 7]] = (9, 5)
    assert largest(peaks).tolist() == [0, 1, 2, 3, 4, 5, 7, 33]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_channel_that_a_model_makes_large_is_kept_apart_where_it_is(
    model_with_one_large_channel: Path, quantization: Literal["int8", "int4"]
) -> None:
    arrays = packed(model_with_one_large_channel, quantization).arrays
    assert CHANNEL in arrays["1.queries_keys_values.outliers"]
    assert all(f"{layer}.{name}.outliers" in arrays for layer in (0, 1) for name in LINEARS)
    again = packed(model_with_one_large_channel, quantization).arrays
    for name in arrays:
        np.testing.assert_array_equal(arrays[name], again[name])


def test_bfloat16_keeps_nothing_apart(model_with_one_large_channel: Path) -> None:
    assert not any(name.endswith(".outliers") for name in packed(model_with_one_large_channel, "none").arrays)
