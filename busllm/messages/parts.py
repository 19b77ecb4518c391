"""Splitting of messages that are larger than the bus carries, and joining them again.

Owns: `Part`, which every inbox of the data path accepts besides its own messages; the publishing loop; the bounded
table of messages that are not whole yet.
Does not know: what the parts contain.

Parts of one message follow each other on one subject from one connection, so they arrive in order or not at all: a
part that does not continue what is there ends the message, and its loss is noticed as any loss (a missing `Taken`, a
hole in the index).
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from busllm.errors import MalformedMessage

_ENVELOPE_BYTES = 512  # more than the Part's own fields and the subject line need
MAX_PARTS = 4096
MAX_OPEN_BYTES = 256 * 1024 * 1024


class Part(msgspec.Struct, frozen=True, array_like=True, tag="part", gc=False):
    """One piece of an encoded message.

    Attributes:
        key: random, the same for all parts of one message.
        number: 0 … count-1.
        count: how many parts there are.
        data: the bytes of this piece.
    """

    key: str
    number: int
    count: int
    data: bytes


_encoder = msgspec.msgpack.Encoder()


def split(payload: bytes, max_payload_bytes: int) -> Iterator[bytes]:
    """Yields payloads that the bus carries: the payload itself when it fits, else encoded `Part`s in order."""
    if len(payload) <= max_payload_bytes:
        yield payload
        return
    size = max_payload_bytes - _ENVELOPE_BYTES
    if size <= 0:
        raise MalformedMessage(f"max_payload {max_payload_bytes} bytes is too small for any part of a message.")
    count = -(-len(payload) // size)
    key = secrets.token_hex(8)
    for number in range(count):
        yield _encoder.encode(Part(key, number, count, payload[number * size : (number + 1) * size]))


class Joiner:
    """Joins parts; holds at most `max_open_bytes` of unfinished messages (the oldest goes first)."""

    def __init__(self, max_open_bytes: int = MAX_OPEN_BYTES) -> None:
        self._max_open_bytes = max_open_bytes
        self._open: OrderedDict[str, list[bytes]] = OrderedDict()
        self._open_bytes = 0

    def add(self, part: Part) -> bytes | None:
        """Takes a part; returns the whole payload with the last one, else None.

        Raises:
            MalformedMessage: impossible numbers.
        """
        if not 0 <= part.number < part.count <= MAX_PARTS:
            raise MalformedMessage(f"Part {part.number} of {part.count} is impossible.")
        pieces = self._open.get(part.key)
        if pieces is None:
            if part.number:
                return None  # its beginning was lost
            pieces = self._open[part.key] = []
        elif part.number != len(pieces):
            self._forget(part.key)
            return None
        pieces.append(part.data)
        self._open_bytes += len(part.data)
        if len(pieces) == part.count:
            self._forget(part.key)
            return b"".join(pieces)
        while self._open_bytes > self._max_open_bytes:
            self._forget(next(iter(self._open)))
        return None

    def _forget(self, key: str) -> None:
        pieces = self._open.pop(key)
        self._open_bytes -= sum(map(len, pieces))
