"""Linears: the numbers of float32 arithmetic on the same weights, and the same bits in every company."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from busllm.engine.cpu.kernels import prepare_kernels
from busllm.engine.cpu.shapes import MOST_OUTLIERS, Format, padded
from tests.engine.cpu.weights import PackedMatrix, packed_matrix

prepare_kernels()

from busllm.engine.cpu.inputs import prepare_row, rows_beside  # noqa: E402
from busllm.engine.cpu.linear import multiply, read_row  # noqa: E402
from tests.engine.cpu.pieces_of_rows import row_inputs  # noqa: E402
from tests.engine.cpu.spaces import workspace  # noqa: E402

SHAPES = [(48, 64), (40, 96), (7, 80), (960, 576)]
APART = (0, 5, 13, 31, 34, 43, 58, 63)  # one in each place of a word, and in each half of it
FORMATS = [(kind, apart) for kind in Format for apart in ((), APART)]
TOLERANCES = {Format.INT4: 1e-2, Format.INT8: 1e-2, Format.BFLOAT16: 4e-3}


def product(matrix: PackedMatrix, states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    rows, columns = states.shape
    space = workspace(columns, rows)
    space.normed[:, :columns] = states
    for row in range(rows):
        prepare_row(matrix.linear, space, row, 0, rows, space.normed[row].ctypes.data)
    out = np.full((rows, padded(len(matrix.dense), 16)), np.nan, np.float32)
    multiply(matrix.linear, space, np.array([0, rows]), out)
    return out[:, : len(matrix.dense)]


def some_states(rows: int, columns: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(3).standard_normal((rows, columns), np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "apart"), FORMATS)
def test_a_product_is_that_of_float32_on_the_same_weights(
    kind: Format, apart: tuple[int, ...], shape: tuple[int, int]
) -> None:
    matrix, states = packed_matrix(kind, *shape, apart), some_states(29, shape[1])
    expected = states.astype(np.float64) @ matrix.dense.T + matrix.bias[: shape[0]]
    error = np.abs(product(matrix, states) - expected).max() / np.abs(expected).max()
    assert error < TOLERANCES[kind]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "apart"), FORMATS)
def test_a_product_is_that_of_float64_on_the_same_weights_and_the_same_rounded_states(
    kind: Format, apart: tuple[int, ...], shape: tuple[int, int]
) -> None:
    """What rounding does is taken out: what is left are float32 sums."""
    matrix, states = packed_matrix(kind, *shape, apart), some_states(29, shape[1])
    expected = rounded(matrix, states) @ matrix.dense.T.astype(np.float64) + matrix.bias[: shape[0]]
    error = np.abs(product(matrix, states) - expected).max() / np.abs(expected).max()
    assert error < 2e-6


def rounded(matrix: PackedMatrix, states: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The states as the linear sees them."""
    rows, columns = states.shape
    space = workspace(columns, rows)
    space.normed[:, :columns] = states
    groups, apart = padded(columns, 32) // 32, matrix.channels
    seen = np.zeros((rows, 32 * groups))
    for row in range(rows):
        prepare_row(matrix.linear, space, row, 0, rows, space.normed[row].ctypes.data)
        seen[row] = row_inputs(space.inputs, Format(matrix.linear[0]), groups, row, (0, rows)).numbers.reshape(-1)
        seen[row, apart] += space.outliers[row, : len(apart)]
    return seen[:, :columns]


@pytest.mark.parametrize(("kind", "apart"), FORMATS)
def test_a_row_has_the_same_bits_alone_and_among_any_number_of_others(kind: Format, apart: tuple[int, ...]) -> None:
    matrix, states = packed_matrix(kind, 40, 96, apart), some_states(31, 96)
    together = product(matrix, states)
    for row in range(31):
        np.testing.assert_array_equal(product(matrix, states[row : row + 1])[0], together[row])
    for rows in range(1, 31):
        np.testing.assert_array_equal(product(matrix, states[:rows]), together[:rows])


@pytest.mark.parametrize(("kind", "apart"), FORMATS)
def test_matrices_one_after_the_other_give_each_of_their_rows_what_one_alone_gives(
    kind: Format, apart: tuple[int, ...]
) -> None:
    together, states = packed_matrix(kind, 3 * 48, 96, apart), some_states(19, 96)
    space, out = workspace(96, 19), np.full((19, 48), np.nan, np.float32)
    space.normed[:, :96] = states
    firsts = np.array([0, 7, 7, 19])  # the second has no rows
    for row in range(19):
        prepare_row(together.linear, space, row, *rows_beside(row, firsts), space.normed[row].ctypes.data)
    multiply(together.linear, space, firsts, out)
    expected = product(together, states)
    np.testing.assert_array_equal(out[:7], expected[:7, :48])
    np.testing.assert_array_equal(out[7:], expected[7:, 96:])


@pytest.mark.parametrize("kind", list(Format))
def test_an_embedding_reads_the_rows_of_the_packed_matrix(kind: Format) -> None:
    matrix = packed_matrix(kind, 40, 96)
    for row in (0, 15, 16, 39):
        out = np.zeros(96, np.float32)
        read_row(matrix.linear, row, out)
        np.testing.assert_array_equal(out, matrix.dense[row])


@pytest.mark.parametrize("kind", [Format.INT4, Format.INT8])
def test_what_is_kept_apart_is_not_rounded_and_drowns_nobody(kind: Format) -> None:
    matrix, states = packed_matrix(kind, 40, 64, APART), some_states(9, 64)
    states[:, APART] *= 500.0
    expected = states.astype(np.float64) @ matrix.dense.T + matrix.bias[:40]
    assert len(APART) == MOST_OUTLIERS
    assert np.abs(product(matrix, states) - expected).max() < 0.3  # in bytes the others would be multiples of 4


def test_what_is_kept_apart_stays_in_the_row_that_it_was_read_from() -> None:
    matrix, states = packed_matrix(Format.INT4, 40, 64, APART), some_states(1, 64)
    space = workspace(64, 1)
    space.normed[:] = states
    prepare_row(matrix.linear, space, 0, 0, 1, space.normed[0].ctypes.data)
    np.testing.assert_array_equal(space.normed, states)
    np.testing.assert_array_equal(space.outliers[0], states[0, APART])


@pytest.mark.parametrize("kind", [Format.INT4, Format.INT8])
def test_the_largest_bytes_do_not_overflow(kind: Format) -> None:
    matrix = packed_matrix(kind, 40, 64)
    states = np.abs(some_states(1, 64)) * np.float32(0.01) + np.float32(10)
    expected = states.astype(np.float64) @ matrix.dense.T + matrix.bias[:40]
    assert np.abs(product(matrix, states) - expected).max() < 2


@pytest.mark.parametrize("kind", list(Format))
def test_a_row_of_zeros_gives_the_bias(kind: Format) -> None:
    matrix = packed_matrix(kind, 40, 64)
    np.testing.assert_array_equal(product(matrix, np.zeros((2, 64), np.float32))[1], matrix.bias[:40])


@pytest.mark.parametrize("kind", list(Format))
def test_rows_that_go_through_the_tiles_in_blocks_have_the_same_bits(kind: Format) -> None:
    matrix, states = packed_matrix(kind, 40, 96), some_states(600, 96)
    together = product(matrix, states)
    for first in (0, 250, 511, 570):
        np.testing.assert_array_equal(product(matrix, states[first : first + 30]), together[first : first + 30])
