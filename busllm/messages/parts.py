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
MAX_OPEN_MESSAGES = 256
MAX_OPEN_PARTS = 4 * MAX_PARTS


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
    """Yields payloads that the bus carries: the payload itself when it fits, else encoded `Part`s in order.

    Raises:
        MalformedMessage: before anything is yielded, when parts cannot carry it.
    """
    if len(payload) <= max_payload_bytes:
        yield payload
        return
    size = max_payload_bytes - _ENVELOPE_BYTES
    if size <= 0:
        raise MalformedMessage(f"max_payload {max_payload_bytes} bytes is too small for any part of a message.")
    count = -(-len(payload) // size)
    if count > MAX_PARTS:
        raise MalformedMessage(
            f"{len(payload)} bytes are {count} parts at a max_payload of {max_payload_bytes} bytes; {MAX_PARTS} may be."
        )
    key = secrets.token_hex(8)
    for number in range(count):
        yield _encoder.encode(Part(key, number, count, payload[number * size : (number + 1) * size]))


class Joiner:
    """Joins parts. What it holds of unfinished messages is bounded: beyond that goes the one that was silent longest.

    Args:
        max_open_bytes: of all of them together.
        max_open_messages: how many may be unfinished.
        max_open_parts: of all of them together; small ones take more room than their bytes.
    """

    def __init__(
        self,
        max_open_bytes: int = MAX_OPEN_BYTES,
        max_open_messages: int = MAX_OPEN_MESSAGES,
        max_open_parts: int = MAX_OPEN_PARTS,
    ) -> None:
        self._max_open_bytes = max_open_bytes
        self._max_open_messages = max_open_messages
        self._max_open_parts = max_open_parts
        self._open: OrderedDict[str, list[bytes]] = OrderedDict()  # the one that was silent longest comes first
        self._open_bytes = 0
        self._open_parts = 0

    def add(self, part: Part) -> bytes | None:
        """Takes a part; returns the whole payload with the last one, else None.

        Raises:
            MalformedMessage: impossible numbers, or no bytes.
        """
        if not 0 <= part.number < part.count <= MAX_PARTS:
            raise MalformedMessage(f"Part {part.number} of {part.count} is impossible.")
        if not part.data:
            raise MalformedMessage(f"Part {part.number} of {part.count} is empty.")
        pieces = self._open.get(part.key)
        if pieces is None:
            if part.number:
                return None  # its beginning was lost
            pieces = self._open[part.key] = []
        elif part.number != len(pieces):
            self._forget(part.key)
            return None
        pieces.append(part.data)
        self._open.move_to_end(part.key)
        self._open_bytes += len(part.data)
        self._open_parts += 1
        if len(pieces) == part.count:
            self._forget(part.key)
            return b"".join(pieces)
        while self._is_over_a_bound():
            self._forget(next(iter(self._open)))
        return None

    def _is_over_a_bound(self) -> bool:
        return (
            self._open_bytes > self._max_open_bytes
            or self._open_parts > self._max_open_parts
            or len(self._open) > self._max_open_messages
        )

    def _forget(self, key: str) -> None:
        pieces = self._open.pop(key)
        self._open_bytes -= sum(map(len, pieces))
        self._open_parts -= len(pieces)
