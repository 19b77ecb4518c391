"""A linear's inputs: as near to the row as bytes allow, at any place of a piece, and no row in another's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from busllm.engine.cpu.kernels import prepare_kernels
from busllm.engine.cpu.shapes import Format

prepare_kernels()

from busllm.engine.cpu.inputs import PIECES, piece_of, prepare_row  # noqa: E402
from tests.engine.cpu.pieces_of_rows import RowInputs, row_inputs  # noqa: E402
from tests.engine.cpu.spaces import workspace  # noqa: E402
from tests.engine.cpu.weights import packed_matrix  # noqa: E402

BYTES = [Format.INT4, Format.INT8]
Floats = npt.NDArray[np.float32]


def prepared(kind: Format, states: Floats) -> list[RowInputs]:
    """The inputs of all rows before a matrix of this format."""
    rows, columns = states.shape
    space, linear = workspace(columns, rows), packed_matrix(kind, 16, columns).linear
    for row in reversed(range(rows)):  # in any order
        prepare_row(linear, space, row, 0, rows, states[row].ctypes.data)
    return [row_inputs(space.inputs, kind, columns // 32, row, (0, rows)) for row in range(rows)]


def normal(*shape: int) -> Floats:
    return np.random.default_rng(4).standard_normal(shape, np.float32)


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("num_rows", range(1, 40))
def test_pieces_follow_each_other_from_the_first_row_to_the_last(first: int, num_rows: int) -> None:
    row, end, sizes = first, first + num_rows, []
    while row < end:
        begin, size = piece_of(row, first, end)
        assert begin == row
        assert [piece_of(other, first, end) for other in range(row, row + size)] == [(row, size)] * size
        sizes.append(size)
        row += size
    assert row == end
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) <= set(PIECES)


@pytest.mark.parametrize("kind", list(Format))
def test_every_row_has_its_own_place(kind: Format) -> None:
    states = normal(2 * PIECES[0] + 3, 96)
    steps = np.abs(states).reshape(-1, 3, 32).max(axis=2, keepdims=True) / 100
    for row, inputs in enumerate(prepared(kind, states)):
        assert (np.abs(inputs.numbers - states[row].reshape(3, 32)) <= steps[row]).all()


@pytest.mark.parametrize("kind", BYTES)
def test_a_row_in_bytes_is_off_by_a_step_at_most_and_keeps_its_zeros(kind: Format) -> None:
    states = 10 * normal(1, 128)
    states[0, 3], states[0, 32:64] = 0, 0
    states[0, 64:96], states[0, 96:] = np.abs(states[0, 64:96]) + 1, -np.abs(states[0, 96:]) - 1
    inputs = prepared(kind, states)[0]
    ranges = np.maximum(states.reshape(4, 32).max(axis=1), 0) - np.minimum(states.reshape(4, 32).min(axis=1), 0)
    np.testing.assert_allclose(inputs.scales, ranges / 254, rtol=1e-6)
    # The zero point is rounded, too: what lies at an end may be half a step off twice.
    assert (np.abs(inputs.numbers - states.reshape(4, 32)) <= 1.01 * inputs.scales[:, None]).all()
    assert np.abs(inputs.integers.astype(np.int64)).max() == 127
    assert abs(inputs.numbers[0, 3]) <= 1e-6
    np.testing.assert_array_equal(inputs.numbers[1], 0)


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 31])
def test_one_number_that_is_none_makes_its_group_such_and_no_other(kind: Format, value: float, place: int) -> None:
    states = normal(2, 96)
    states[0, 32 + place] = value
    space, linear = workspace(96, 2), packed_matrix(kind, 16, 96).linear
    for row in range(2):
        prepare_row(linear, space, row, 0, 2, states[row].ctypes.data)
    tables = np.ascontiguousarray(space.inputs.reshape(-1)[: 3 * 2 * 44].reshape(3, -1)[:, 2 * 32 :]).view(np.float32)
    assert np.isnan(tables[1, 0])  # the scale of the group
    tables[1, [0, 2]] = 0  # and its offset; the starts are no floats
    assert np.isfinite(tables[:, :4]).all()


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("size", [1e-45, 1e-38, 7e-37, 2e-36])
def test_numbers_too_small_for_a_scale_are_zeros(kind: Format, size: float) -> None:
    states = np.zeros((1, 32), np.float32)
    states[0, ::2], states[0, 1] = size, -size
    inputs = prepared(kind, states)[0]
    np.testing.assert_allclose(inputs.numbers[0], states[0], atol=2e-36)
    assert np.isfinite([inputs.scales[0], inputs.offsets[0]]).all()
