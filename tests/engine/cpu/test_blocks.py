"""Quantised blocks: taken over from a GGUF without a change, or rounded as little as the format allows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from busllm.engine.cpu.blocks import own_format, quantise, read_blocks
from busllm.engine.cpu.shapes import Format
from busllm.model_store.gguf_file import GgufTensor
from busllm.model_store.gguf_weights import GgufWeight
from tests.engine.cpu.weights import to_float32


def stored(kind: GGMLQuantizationType, rows: int = 5, columns: int = 96) -> GgufWeight:
    weights = np.random.default_rng(1).standard_normal((rows, columns), np.float32)
    raw = gguf.quants.quantize(weights, kind)
    return GgufWeight(GgufTensor(kind, (rows, columns), raw.view(np.uint8)))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (GGMLQuantizationType.Q4_0, Format.INT4),
        (GGMLQuantizationType.Q4_1, Format.INT4),
        (GGMLQuantizationType.Q8_0, Format.INT8),
    ],
)
def test_blocks_of_a_gguf_keep_their_numbers(kind: GGMLQuantizationType, expected: Format) -> None:
    tensor = stored(kind)
    assert own_format([tensor, tensor]) is expected
    blocks = read_blocks(tensor, expected)
    assert blocks.format is expected
    np.testing.assert_array_equal(to_float32(blocks, 96), tensor.to_float32())


def test_other_or_mixed_formats_are_kept_in_int8() -> None:
    assert own_format([stored(GGMLQuantizationType.Q5_1)]) is Format.INT8
    assert own_format([stored(GGMLQuantizationType.Q4_0), stored(GGMLQuantizationType.Q8_0)]) is Format.INT8
    assert own_format([stored(GGMLQuantizationType.BF16)]) is Format.BFLOAT16


@pytest.mark.parametrize(("kind", "steps"), [(Format.INT4, 15), (Format.INT8, 254)])
def test_quantising_is_off_by_half_a_step_at_most(kind: Format, steps: int) -> None:
    weights = np.random.default_rng(2).standard_normal((7, 80), np.float32)
    error = np.abs(to_float32(quantise(weights, kind), 80) - weights).max()
    # Each group's range, cut into steps; a scale in float16 moves it by a thousandth.
    assert error <= (weights.max() - weights.min()) * 1.01 * (0.5 if kind is Format.INT4 else 1) / steps


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even() -> None:
    weights = np.array([[1.0, 1.00390625, 1.01171875, -1.0078125, 3.3e38, 0.0]], np.float32)
    rounded = to_float32(quantise(weights, Format.BFLOAT16), 6)
    np.testing.assert_allclose(rounded, [[1.0, 1.0, 1.015625, -1.0078125, 3.3e38, 0.0]], rtol=2**-9)
    assert rounded[0, 1] == 1.0 and rounded[0, 2] == 1.015625


@pytest.mark.parametrize("kind", list(Format))
def test_a_group_of_zeros_stays_zero(kind: Format) -> None:
    assert not to_float32(quantise(np.zeros((3, 64), np.float32), kind), 64).any()
