"""Encoding of messages: one encoder for all, one typed decoder per inbox, and the packing of token ids.

Owns: MessagePack for the data path, JSON for what people read; the translation of decoding errors to
`MalformedMessage`.
Does not know: which inbox there is (the file of each recipient makes its own `Decoder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from busllm.errors import MalformedMessage

T = TypeVar("T")
MAX_NUMBER = 2**31 - 1  # numbers travel in columns as int32

_INT32 = np.dtype("<i4")
_packer = msgspec.msgpack.Encoder()
_writer = msgspec.json.Encoder()


def check_numbers(*numbers: int) -> None:
    """Checks that numbers of a message fit into a column.

    Raises:
        ValueError: one is negative or over `MAX_NUMBER`.
    """
    for number in numbers:
        if not 0 <= number <= MAX_NUMBER:
            raise ValueError(f"{number} is not between 0 and {MAX_NUMBER}")


def encode(message: Any) -> bytes:
    """Encodes a message of the data path as MessagePack."""
    return _packer.encode(message)


def encode_json(message: Any) -> bytes:
    """Encodes what people and stock tools read as JSON."""
    return _writer.encode(message)


class Decoder(Generic[T]):
    """Decodes one inbox: everything that may arrive there is one union type."""

    def __init__(self, type_: Any, *, json: bool = False) -> None:
        self._decoder: Any = msgspec.json.Decoder(type_) if json else msgspec.msgpack.Decoder(type_)

    def decode(self, payload: bytes) -> T:
        """Decodes one payload.

        Raises:
            MalformedMessage: the bytes are not a message of this inbox.
        """
        try:
            message: T = self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise MalformedMessage(f"A payload of {len(payload)} bytes does not decode: {error}") from error
        return message


def pack_ids(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Packs token ids as int32 little-endian."""
    return np.asarray(token_ids, dtype=_INT32).tobytes()


def unpack_ids(packed: bytes) -> np.ndarray:
    """Unpacks int32 little-endian token ids; the array (n,) is a read-only view of the bytes.

    Raises:
        MalformedMessage: the length is no multiple of four.
    """
    if len(packed) % 4:
        raise MalformedMessage(f"Packed token ids have {len(packed)} bytes, which is no multiple of 4.")
    return np.frombuffer(packed, dtype=_INT32)
