"""The GGUF container: metadata and tensors of one file, read without copying the weights.

Owns: the binary format (the specification is ggml's docs/gguf.md, versions 2 and 3, little-endian). The header is
parsed here rather than by `gguf.GGUFReader`, which takes two seconds for a vocabulary of 49,152; this takes a tenth.
Does not know: what a tensor or a metadata key means (`gguf_weights.py`, `gguf_config.py`, `gguf_tokenizer.py`).
Next on the path: `gguf_weights.py`.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from busllm.errors import ModelError
from busllm.model_store.config_values import ConfigValues

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT_BYTES = 32
_MAX_DIMENSIONS = 4
_BOOL, _STRING, _ARRAY = 7, 8, 9
# value type number → struct code
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}


class GgufTensor(NamedTuple):
    """One tensor as the file holds it.

    Attributes:
        quantization: ggml's number format.
        shape: rows first, as numpy and PyTorch count (ggml counts the other way).
        raw: uint8, shape [product of all dimensions but the last, bytes of one row]; a view of the mapped file.
    """

    quantization: GGMLQuantizationType
    shape: tuple[int, ...]
    raw: np.ndarray[Any, np.dtype[np.uint8]]


class _Cursor:
    """Reads values one after the other from the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        num_bytes = self.scalar("Q")
        start = self.position
        self.position = start + num_bytes
        if self.position > len(self._data):
            raise struct.error(f"a string of {num_bytes} bytes goes past the end")
        # Vocabularies of sentencepiece models have tokens that are not UTF-8 in old files.
        return self._data[start : self.position].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _BOOL:
            return bool(self.scalar("B"))
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise struct.error(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return self._strings(length)
        if kind == _BOOL or kind in _SCALARS:
            code = _SCALARS.get(kind, "?")
            values = struct.unpack_from(f"<{length}{code}", self._data, self.position)
            self.position += struct.calcsize(f"<{length}{code}")
            return list(values)
        return [self.value(kind) for _ in range(length)]

    def _strings(self, length: int) -> list[str]:
        # Two of these arrays have an entry per token: the loop is written out, it is most of the time of opening.
        data, position, size_of, strings = self._data, self.position, struct.Struct("<Q").unpack_from, []
        for _ in range(length):
            start = position + 8
            position = start + size_of(data, position)[0]
            strings.append(data[start:position].decode("utf-8", errors="replace"))
        if position > len(data):
            raise struct.error("an array of strings goes past the end")
        self.position = position
        return strings


class GgufFile:
    """An open GGUF file.

    Attributes:
        path: the file.
        metadata: key → value; arrays are lists.
        tensors: name → tensor, in the order of the file.

    Raises:
        ModelError: not a GGUF file, a version or number format that is not known, or cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be opened: {error}") from error
        try:
            self._read()
        except (struct.error, OverflowError, MemoryError, RecursionError) as error:
            raise ModelError(f"{path} is not a complete GGUF file: {error}. Fetch it again.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Arrays that were handed out keep the mapping alive; it goes with the last of them.
        self.tensors = {}

    def dequantize(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A tensor's values.

        Returns:
            float32, the tensor's shape, in the order of the file.

        Raises:
            ModelError: no such tensor, or a number format that cannot be decoded.
        """
        if name not in self.tensors:
            raise ModelError(f"{self.path} has no tensor {name!r}.")
        tensor = self.tensors[name]
        return dequantize(tensor.raw, tensor.quantization).reshape(tensor.shape)

    def _read(self) -> None:
        cursor = _Cursor(self._data)
        if self._data[:4] != _MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file: it begins with {self._data[:4]!r}.")
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path} has GGUF version {version}; versions 2 and 3 (little-endian) can be read.")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        infos = [self._read_info(cursor) for _ in range(num_tensors)]
        alignment = ConfigValues(self.metadata, str(self.path)).whole(_ALIGNMENT, default=_DEFAULT_ALIGNMENT_BYTES)
        data_start = -(-cursor.position // alignment) * alignment
        for name, quantization, shape, offset in infos:
            self.tensors[name] = self._map(name, quantization, shape, data_start + offset)

    def _read_info(self, cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = cursor.string()
        num_dimensions = cursor.scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ModelError(f"{self.path}: tensor {name!r} has {num_dimensions} dimensions. Fetch it again.")
        shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
        number = cursor.scalar("I")
        try:
            quantization = GGMLQuantizationType(number)
        except ValueError as error:
            raise ModelError(f"{self.path}: tensor {name!r} has the unknown number format {number}.") from error
        return name, quantization, shape, cursor.scalar("Q")

    def _map(self, name: str, quantization: GGMLQuantizationType, shape: tuple[int, ...], start: int) -> GgufTensor:
        block_values, block_bytes = GGML_QUANT_SIZES[quantization]
        if not shape or shape[-1] % block_values:
            raise ModelError(
                f"{self.path}: rows of tensor {name!r} (shape {shape}) are not whole blocks of {block_values} values."
            )
        row_bytes = shape[-1] // block_values * block_bytes
        num_rows = prod(shape[:-1])
        if start + num_rows * row_bytes > len(self._data):
            raise ModelError(f"{self.path} is cut short: tensor {name!r} goes past its end. Fetch it again.")
        flat = np.frombuffer(self._data, dtype=np.uint8, count=num_rows * row_bytes, offset=start)
        return GgufTensor(quantization, shape, flat.reshape(num_rows, row_bytes))


def dequantize(
    raw: np.ndarray[Any, np.dtype[np.uint8]], quantization: GGMLQuantizationType
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Decodes rows.

    Args:
        raw: uint8, [rows, bytes of one row].

    Returns:
        float32, [rows, values of one row].

    Raises:
        ModelError: the number format cannot be decoded.
    """
    try:
        return np.asarray(gguf_dequantize(raw, quantization), dtype=np.float32)
    except NotImplementedError as error:
        raise ModelError(f"Weights in {quantization.name} cannot be decoded: {error}") from error
