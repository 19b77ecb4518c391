"""What a linear's inputs are, read by numpy from the pieces that compiled code writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from busllm.engine.cpu.kernels import prepare_kernels
from busllm.engine.cpu.shapes import GROUP, Format

prepare_kernels()

from busllm.engine.cpu.inputs import piece_of  # noqa: E402


class RowInputs(NamedTuple):
    """One row: float64 (groups, 32) numbers; of bytes also int8 (groups, 32) and (groups,) of each table."""

    numbers: npt.NDArray[np.float64]
    integers: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.float32]
    starts: npt.NDArray[np.int32]


def row_inputs(inputs: npt.NDArray[np.uint8], kind: Format, groups: int, row: int, rows: tuple[int, int]) -> RowInputs:
    """Reads a row of `Workspace.inputs` of a matrix that has the rows rows[0] … rows[1] - 1."""
    begin, size = piece_of(row, *rows)
    each, place = 2 * GROUP if kind is Format.BFLOAT16 else GROUP + 12, row - begin
    piece = inputs[begin : begin + size].reshape(-1)[: size * groups * each].reshape(groups, size * each)
    if kind is Format.BFLOAT16:
        words = piece.view(np.uint16).reshape(groups, size, GROUP)
        numbers = (words[:, place].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        nothing: npt.NDArray[Any] = np.zeros((0, 0))
        return RowInputs(numbers, nothing, nothing, nothing, nothing)
    integers = piece[:, : size * GROUP].reshape(groups, size, GROUP)[:, place].view(np.int8)
    tables = piece[:, size * GROUP :].reshape(groups, 3, size, 4)[:, :, place]
    scales, offsets = (np.ascontiguousarray(tables[:, table]).view(np.float32)[:, 0] for table in (0, 1))
    starts = np.ascontiguousarray(tables[:, 2]).view(np.int32)[:, 0]
    totals = integers.sum(axis=1, dtype=np.int32)
    if kind is Format.INT4:
        zero_points = starts.astype(np.int8)
        assert (starts.view(np.int8).reshape(-1, 4) == zero_points[:, None]).all()
        numbers = scales[:, None].astype(np.float64) * (integers.astype(np.float64) + zero_points[:, None])
        np.testing.assert_allclose(offsets, numbers.sum(axis=1), rtol=1e-5, atol=1e-4)
    else:
        np.testing.assert_array_equal(starts, -128 * totals)
        numbers = scales[:, None].astype(np.float64) * integers + offsets[:, None]
    return RowInputs(numbers, integers, scales, offsets, starts)
