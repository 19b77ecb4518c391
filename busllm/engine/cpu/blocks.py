"""Matrices as groups of 32 weights: taken as they are from a GGUF, or quantised from float32.

Owns: the block formats of ggml that can be taken over without a change, and the rounding of the others.
Does not know: the layout that the kernels want (`pack.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from busllm.engine.cpu.shapes import GROUP, Format, padded
from busllm.model_store.weights import WeightTensor

_EXPONENT_BITS = np.uint16(0x7F80)  # of a bfloat16; all set in NaN and infinity

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# What a stored format becomes: blocks are taken over as they are; of floats only bfloat16 is not rounded.
_OWN_FORMATS = {
    "q4_0": Format.INT4,
    "q4_1": Format.INT4,
    "q8_0": Format.INT8,
    "float32": Format.BFLOAT16,
    "float16": Format.BFLOAT16,
    "bfloat16": Format.BFLOAT16,
}


@dataclass(frozen=True)
class Blocks:
    """A matrix in one of the three formats.

    Attributes:
        format: of `values`.
        values: (rows, groups, 32): uint8 0 … 15 for int4, int8, uint16 for bfloat16.
        scales: float32 (rows, groups); ones for bfloat16.
        minimums: float32 (rows, groups): weight = scale * value + minimum; only int4 has any but zeros.
    """

    format: Format
    values: npt.NDArray[Any]
    scales: Floats
    minimums: Floats

    @property
    def is_finite(self) -> bool:
        """Whether all weights are numbers: a NaN or infinity in a group is one in its scale or minimum."""
        if self.format is Format.BFLOAT16:
            return not ((self.values & _EXPONENT_BITS) == _EXPONENT_BITS).any()
        return bool(np.isfinite(self.scales).all() and np.isfinite(self.minimums).all())

    def padded_to(self, num_rows: int) -> Blocks:
        """With rows of zeros below."""
        missing = num_rows - len(self.values)
        values = np.pad(self.values, ((0, missing), (0, 0), (0, 0)))
        scales, minimums = (np.pad(x, ((0, missing), (0, 0))) for x in (self.scales, self.minimums))
        return Blocks(self.format, values, scales, minimums)


def own_format(tensors: Sequence[WeightTensor]) -> Format:
    """The format that these tensors become, or int8 where they become several: blocks of ggml stay as they are stored,
    float32 and float16 are rounded to bfloat16, other blocks to int8.
    """
    formats = {_OWN_FORMATS.get(tensor.quantization, Format.INT8) for tensor in tensors}
    return formats.pop() if len(formats) == 1 else Format.INT8


def read_blocks(tensor: WeightTensor, kind: Format) -> Blocks:
    """Reads a matrix.

    Args:
        tensor: (rows, columns).
        kind: the wanted format; a tensor in another one is decoded and rounded.

    Raises:
        ModelError: the number format cannot be decoded.
    """
    if _OWN_FORMATS.get(tensor.quantization) is kind and kind is not Format.BFLOAT16:
        return _take_over(tensor)
    return quantise(tensor.to_float32(), kind)


def quantise(weights: Floats, kind: Format) -> Blocks:
    """Rounds a matrix, float32 (rows, columns); columns are padded with zeros to whole groups."""
    rows, columns = weights.shape
    wide = np.pad(weights, ((0, 0), (0, padded(columns, GROUP) - columns)))
    grouped = wide.reshape(rows, -1, GROUP)
    ones, zeros = (np.full(grouped.shape[:2], value, np.float32) for value in (1.0, 0.0))
    match kind:
        case Format.BFLOAT16:
            return Blocks(kind, _to_bfloat16(grouped), ones, zeros)
        case Format.INT8:
            scales = np.abs(grouped).max(axis=-1) / np.float32(127)
            return Blocks(kind, _rounded(grouped, scales, zeros, -127, 127).astype(np.int8), scales, zeros)
        case Format.INT4:
            # The scale is stored as float16, so the weights are rounded to what it will be.
            least, most = grouped.min(axis=-1), grouped.max(axis=-1)
            minimums = least.astype(np.float16).astype(np.float32)
            scales = ((most - minimums) / np.float32(15)).astype(np.float16).astype(np.float32)
            codes = _rounded(grouped, scales, minimums, 0, 15).astype(np.uint8)
            return Blocks(kind, codes, scales, minimums)
        case _:
            assert_never(kind)


def _rounded(grouped: Floats, scales: Floats, minimums: Floats, low: int, high: int) -> Floats:
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    codes: Floats = np.clip(np.rint((grouped - minimums[..., None]) * inverse[..., None]), low, high)
    return codes


def _to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """Rounds to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def _take_over(tensor: WeightTensor) -> Blocks:
    """A tensor in blocks of ggml (ggml-common.h: block_q4_0, block_q4_1, block_q8_0)."""
    rows, columns = tensor.shape
    blocks = np.ascontiguousarray(tensor.raw).reshape(rows, columns // GROUP, -1)

    def halves(first: int) -> Floats:
        return np.ascontiguousarray(blocks[..., first : first + 2]).view(np.float16)[..., 0].astype(np.float32)

    scales = halves(0)
    match tensor.quantization:
        case "q4_1":
            return Blocks(Format.INT4, _nibbles(blocks[..., 4:]), scales, halves(2))
        case "q4_0":
            return Blocks(Format.INT4, _nibbles(blocks[..., 2:]), scales, scales * np.float32(-8))
        case _:
            return Blocks(Format.INT8, blocks[..., 2:].view(np.int8), scales, np.zeros_like(scales))


def _nibbles(packed: Bytes) -> Bytes:
    """ggml's order: byte i has weight i in its lower nibble and 16 + i in its upper one."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)
