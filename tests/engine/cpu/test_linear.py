"""Linears: the numbers of float32 arithmetic on the same weights, and the same bits in every company."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from busllm.engine.cpu.kernels import prepare_kernels
from busllm.engine.cpu.shapes import Format, States, Workspace, padded
from tests.engine.cpu.weights import PackedMatrix, packed_matrix

prepare_kernels()

from busllm.engine.cpu.linear import multiply, prepare_row, read_row  # noqa: E402
from busllm.engine.cpu.workspace import make_workspace  # noqa: E402
from busllm.engine.models.config import ModelConfig  # noqa: E402
from busllm.engine.models.rope_config import RopeConfig  # noqa: E402

SHAPES = [(48, 64), (40, 96), (7, 80), (960, 576)]
FORMATS = [
    (Format.INT4, States.INT16),
    (Format.INT4, States.UINT8),
    (Format.INT8, States.INT16),
    (Format.BFLOAT16, States.BFLOAT16),
]
TOLERANCES = {States.INT16: 1e-4, States.UINT8: 1e-2, States.BFLOAT16: 4e-3}


def workspace(columns: int, rows: int) -> Workspace:
    config = ModelConfig(
        architecture="test",
        vocab_size=16,
        hidden_size=columns,
        intermediate_size=columns,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_context_tokens=16,
        rope=RopeConfig(16, 1e4),
        tie_word_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        layer_windows=(None,),
    )
    return make_workspace(config, rows)


def product(matrix: PackedMatrix, states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    rows, columns = states.shape
    space = workspace(columns, rows)
    space.normed[:, :columns] = states
    for row in range(rows):
        prepare_row(matrix.linear, space, row, space.normed[row].ctypes.data)
    out = np.full((rows, padded(len(matrix.dense), 16)), np.nan, np.float32)
    multiply(matrix.linear, space, rows, out)
    return out[:, : len(matrix.dense)]


def some_states(rows: int, columns: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(3).standard_normal((rows, columns), np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "format_of_states"), FORMATS)
def test_a_product_is_that_of_float32_on_the_same_weights(
    kind: Format, format_of_states: States, shape: tuple[int, int]
) -> None:
    matrix, states = packed_matrix(kind, *shape, format_of_states), some_states(29, shape[1])
    expected = states.astype(np.float64) @ matrix.dense.T + matrix.bias[: shape[0]]
    error = np.abs(product(matrix, states) - expected).max() / np.abs(expected).max()
    assert error < TOLERANCES[format_of_states]


@pytest.mark.parametrize(("kind", "format_of_states"), FORMATS)
def test_a_row_has_the_same_bits_alone_and_among_any_number_of_others(kind: Format, format_of_states: States) -> None:
    matrix, states = packed_matrix(kind, 40, 96, format_of_states), some_states(31, 96)
    together = product(matrix, states)
    for row in range(31):
        np.testing.assert_array_equal(product(matrix, states[row : row + 1])[0], together[row])
    for rows in range(1, 31):
        np.testing.assert_array_equal(product(matrix, states[:rows]), together[:rows])


@pytest.mark.parametrize("kind", list(Format))
def test_an_embedding_reads_the_rows_of_the_packed_matrix(kind: Format) -> None:
    matrix = packed_matrix(kind, 40, 96)
    for row in (0, 15, 16, 39):
        out = np.zeros(96, np.float32)
        read_row(matrix.linear, row, out)
        np.testing.assert_array_equal(out, matrix.dense[row])


@pytest.mark.parametrize("kind", [Format.INT4, Format.INT8])
def test_one_large_number_does_not_drown_its_group(kind: Format) -> None:
    matrix, states = packed_matrix(kind, 40, 64), some_states(1, 64)
    states[0, 5] = 500.0
    expected = states.astype(np.float64) @ matrix.dense.T + matrix.bias[:40]
    small = np.abs(product(matrix, states) - expected).max()
    assert small < 0.2  # with eight bits the others of the group would be rounded to multiples of 4


@pytest.mark.parametrize("format_of_states", [States.INT16, States.UINT8])
def test_a_row_of_zeros_gives_the_bias(format_of_states: States) -> None:
    matrix = packed_matrix(Format.INT4, 40, 64, format_of_states)
    np.testing.assert_array_equal(product(matrix, np.zeros((2, 64), np.float32))[1], matrix.bias[:40])
