"""Matrices in the layout that the kernels read: tiles of 16 outputs, group after group.

Owns: the layout (`tiles.py` reads it), and the alignment of memory.
Does not know: where weights come from (`blocks.py`), layers.
Next on the path: `packed_model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from busllm.engine.cpu.blocks import Blocks
from busllm.engine.cpu.shapes import GROUP, VECTOR, Format, padded

ALIGNMENT_BYTES = 64  # a cache line, and the largest vector

Bytes = npt.NDArray[np.uint8]


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that begin at a cache line; memory is used only as it is written."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(num_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
    first = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[first : first + num_bytes].view(dtype).reshape(shape)


def group_bytes(kind: Format) -> int:
    """Bytes of one group of one tile."""
    match kind:
        case Format.INT4:
            return 4 * 64 + 2 * 32
        case Format.INT8:
            return 8 * 64 + 64
        case Format.BFLOAT16:
            return 16 * 64
        case _:
            assert_never(kind)


def pack(parts: Sequence[Blocks], unit: int = VECTOR) -> Bytes:
    """Packs matrices that stand one below the other.

    Args:
        parts: of the same format and number of groups.
        unit: the rows of each are padded to a multiple of it.

    Returns:
        uint8 (tiles, groups, bytes of a group).
    """
    whole = [part.padded_to(padded(len(part.values), unit)) for part in parts]
    kind = parts[0].format
    joined = Blocks(
        kind,
        np.concatenate([part.values for part in whole]),
        np.concatenate([part.scales for part in whole]),
        np.concatenate([part.minimums for part in whole]),
    )
    joined = joined.padded_to(padded(len(joined.values), VECTOR))
    values, scales, minimums = joined.values, _by_tile(joined.scales), _by_tile(joined.minimums)
    num_tiles, num_groups = scales.shape[:2]
    out = aligned_zeros((num_tiles, num_groups, group_bytes(kind)), np.uint8)
    match kind:
        case Format.INT4:
            out[..., :256] = _interleaved(_joined_nibbles(values), 4, 4)
            out[..., 256:288] = scales.astype(np.float16).view(np.uint8)
            out[..., 288:320] = minimums.astype(np.float16).view(np.uint8)
        case Format.INT8:
            out[..., :512] = _interleaved(values.view(np.uint8) ^ 0x80, 8, 4)  # 128 more: without a sign
            out[..., 512:576] = scales.view(np.uint8)
        case Format.BFLOAT16:
            out[...] = _interleaved(values, GROUP // 2, 2)
        case _:
            assert_never(kind)
    return out


def _by_tile(table: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """(rows, groups) → (tiles, groups, 16)."""
    tiles = table.reshape(-1, VECTOR, table.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(tiles)


def _interleaved(values: npt.NDArray[Any], steps: int, each: int) -> Bytes:
    """(rows, groups, steps * each) → bytes (tiles, groups, …) in the order (step, lane, within the step)."""
    rows, groups = values.shape[:2]
    split = values.reshape(rows // VECTOR, VECTOR, groups, steps, each)
    ordered = np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4))  # (tiles, groups, steps, 16, each)
    return ordered.reshape(rows // VECTOR, groups, -1).view(np.uint8)


def _joined_nibbles(values: Bytes) -> Bytes:
    """(rows, groups, 32) of 0 … 15 → bytes (rows, groups, 16): of each 8, the first four are the lower nibbles."""
    eights = values.reshape(*values.shape[:2], -1, 2, 4)
    joined = np.bitwise_or(eights[..., 0, :], np.left_shift(eights[..., 1, :], 4))
    return joined.reshape(*values.shape[:2], -1)
