"""Matrices for tests, in the packed layout and as the numbers that it stands for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from busllm.engine.cpu.blocks import Blocks, quantise
from busllm.engine.cpu.pack import pack
from busllm.engine.cpu.packed_model import states_of
from busllm.engine.cpu.shapes import Format, States, padded

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
    """One matrix; `linear` points into `packed` and `bias`."""

    linear: npt.NDArray[np.int64]
    packed: npt.NDArray[np.uint8]
    bias: Floats
    dense: Floats


def packed_matrix(kind: Format, rows: int, columns: int, states: States | None = None) -> PackedMatrix:
    """A random one; its inputs are in the format of a head's where nothing is said."""
    states = states_of(kind, None) if states is None else states
    source = np.random.default_rng(0)
    blocks = quantise(source.standard_normal((rows, columns), np.float32), kind)
    packed = pack([blocks])
    bias = np.zeros(padded(rows, 16), np.float32)
    bias[:rows] = source.standard_normal(rows, np.float32)
    fields = (kind, packed.ctypes.data, bias.ctypes.data, *packed.shape[:2], states)
    return PackedMatrix(np.array(fields, np.int64), packed, bias, to_float32(blocks, columns))
