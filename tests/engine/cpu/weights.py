"""Matrices for tests, in the packed layout and as the numbers that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from busllm.engine.cpu.blocks import Blocks, quantise
from busllm.engine.cpu.pack import pack
from busllm.engine.cpu.shapes import Format, padded

Floats = npt.NDArray[np.float32]


def to_float32(blocks: Blocks, columns: int) -> Floats:
    """The numbers that blocks stand for."""
    if blocks.format is Format.BFLOAT16:
        values = (blocks.values.astype(np.uint32) << 16).view(np.float32)
    else:
        values = blocks.values.astype(np.float32) * blocks.scales[..., None] + blocks.minimums[..., None]
    return values.reshape(len(values), -1)[:, :columns]


@dataclass(frozen=True)
class PackedMatrix:
    """One matrix; `linear` points into `packed`, `bias` and `channels`."""

    linear: npt.NDArray[np.int64]
    packed: npt.NDArray[np.uint8]
    bias: Floats
    channels: npt.NDArray[np.int64]
    dense: Floats


def packed_matrix(kind: Format, rows: int, columns: int, outliers: Sequence[int] = ()) -> PackedMatrix:
    """A random one; `outliers` are the inputs that are kept apart."""
    source = np.random.default_rng(0)
    blocks = quantise(source.standard_normal((rows, columns), np.float32), kind)
    packed = pack([blocks])
    bias = np.zeros(padded(rows, 16), np.float32)
    bias[:rows] = source.standard_normal(rows, np.float32)
    channels = np.array(outliers, np.int64)
    fields = (kind, packed.ctypes.data, bias.ctypes.data, *packed.shape[:2], channels.ctypes.data, len(channels))
    return PackedMatrix(np.array(fields, np.int64), packed, bias, channels, to_float32(blocks, columns))
