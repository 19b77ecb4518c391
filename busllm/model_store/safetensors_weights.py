"""Weights of safetensors files, mapped and not copied.

Owns: the safetensors container (an 8-byte length, a JSON header, the bytes; huggingface/safetensors, README, "Format").
It is read here because the library gives bfloat16 only to torch.
Does not know: names or layers, torch.
Next on the path: `weights.py`, through which the engine reads.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import numpy as np

from busllm.errors import ModelError
from busllm.model_store.tensor_part import WHOLE, TensorPart

MAX_HEADER_BYTES = 100_000_000  # as in the format's own library
_BITS: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8)
    | dict.fromkeys(("I16", "U16", "F16", "BF16"), 16)
    | dict.fromkeys(("I32", "U32", "F32"), 32)
    | dict.fromkeys(("I64", "U64", "F64", "C64"), 64)
    | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
)
_FLOAT_FORMATS: Mapping[str, str] = MappingProxyType({"F32": "float32", "F16": "float16", "BF16": "bfloat16"})


_NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True):
    """What a header says about one tensor; offsets count from the header's end."""

    dtype: str
    shape: tuple[_NotNegative, ...]
    data_offsets: tuple[_NotNegative, _NotNegative]


class SafetensorsWeight:
    """A `WeightTensor` of a safetensors file.

    Args:
        name: for messages.
        dtype: as safetensors writes it ("BF16").
        shape: rows first.
        flat: uint8, all bytes of the tensor.
    """

    def __init__(
        self, name: str, dtype: str, shape: tuple[int, ...], flat: np.ndarray[Any, np.dtype[np.uint8]]
    ) -> None:
        self._name = name
        self._dtype = dtype
        self._shape = shape
        self._flat = flat

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def quantization(self) -> str:
        return _FLOAT_FORMATS.get(self._dtype, self._dtype.lower())

    @property
    def raw(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        num_rows = prod(self._shape[:-1])
        return self._flat.reshape(num_rows, len(self._flat) // num_rows if num_rows else 0)

    def to_float32(self, part: TensorPart = WHOLE) -> np.ndarray[Any, np.dtype[np.float32]]:
        match self._dtype:
            case "F32":
                return self._stored(np.float32, part)
            case "F16":
                return self._stored(np.float16, part).astype(np.float32)
            case "BF16":
                # A bfloat16 is the upper half of a float32.
                halves = self._stored(np.uint16, part).astype(np.uint32)
                return (halves << 16).view(np.float32)
            case _:
                raise ModelError(f"The tensor {self._name!r} is {self._dtype}; F32, F16 and BF16 can be read.")

    def _stored(self, dtype: Any, part: TensorPart) -> np.ndarray[Any, Any]:
        """A view of the mapped file."""
        values: np.ndarray[Any, Any] = self._flat.view(dtype).reshape(self._shape)
        if part == WHOLE:
            return values
        rows: np.ndarray[Any, Any] = values[part.rows]
        return rows if len(self._shape) == 1 else np.ascontiguousarray(rows[..., part.columns])


def iter_safetensors(paths: Sequence[Path]) -> Iterator[tuple[str, SafetensorsWeight]]:
    """All weights of a checkpoint's files.

    Yields:
        (name as stored, tensor).

    Raises:
        ModelError: a file is damaged.
    """
    for path in paths:
        yield from _iter_file(path)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of one file, name → entry as it stands there, and its end, from which offsets count."""
    try:
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes > min(path.stat().st_size - 8, MAX_HEADER_BYTES):
                raise ModelError(f"{path} is not a complete safetensors file. Fetch it again.")
            header = json.loads(file.read(num_bytes))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a complete safetensors file: {error}. Fetch it again.") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file: its header is not a JSON object.")
    header.pop("__metadata__", None)
    return header, 8 + num_bytes


def _iter_file(path: Path) -> Iterator[tuple[str, SafetensorsWeight]]:
    header, data_start = _read_header(path)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    entries = {name: _checked(path, name, entry, len(data) - data_start) for name, entry in header.items()}
    _refuse_overlaps(path, entries)
    for name, entry in entries.items():
        start, end = entry.data_offsets
        flat = np.frombuffer(data, np.uint8, end - start, data_start + start)
        yield name, SafetensorsWeight(name, entry.dtype, entry.shape, flat)


def _checked(path: Path, name: str, entry: object, num_data_bytes: int) -> _Entry:
    """One entry of a header, if it can be true of a file with so many bytes after the header."""
    try:
        checked = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: the header's entry of {name!r} is not understood: {error}.") from error
    start, end = checked.data_offsets
    if end > num_data_bytes:
        raise ModelError(f"{path} is cut short: tensor {name!r} goes past its end. Fetch it again.")
    if checked.dtype not in _BITS:
        raise ModelError(f"{path}: tensor {name!r} has the unknown number format {checked.dtype!r}.")
    needed = prod(checked.shape) * _BITS[checked.dtype] // 8
    if end - start != needed:
        raise ModelError(
            f"{path}: tensor {name!r} is {checked.dtype} of shape {list(checked.shape)}, which are {needed} bytes; "
            f"its data_offsets {[start, end]} give it {end - start}. Fetch it again."
        )
    return checked


def _refuse_overlaps(path: Path, entries: Mapping[str, _Entry]) -> None:
    in_order = sorted(entries, key=lambda name: entries[name].data_offsets)
    for before, name in pairwise(in_order):
        if entries[name].data_offsets[0] < entries[before].data_offsets[1]:
            raise ModelError(f"{path}: the data_offsets of {before!r} and {name!r} overlap. Fetch it again.")
