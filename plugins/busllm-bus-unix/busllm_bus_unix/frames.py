"""What travels over the socket: MessagePack structs, each behind its length in four bytes.

Owns: the frames of both directions and cutting a byte stream into them.
Does not know: what the broker or a connection does with a frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

_LENGTH_BYTES = 4
T = TypeVar("T")


class Hello(msgspec.Struct, array_like=True, tag=0):
    """Broker → client, first: the largest payload that it takes."""

    max_payload_bytes: int


class Deliver(msgspec.Struct, array_like=True, tag=1):
    """Broker → client: a message on one of its subscriptions."""

    subscription: int
    subject: str
    payload: bytes
    reply: str | None
    no_responders: bool


class Pong(msgspec.Struct, array_like=True, tag=2):
    """Broker → client: everything before the oldest unanswered `Ping` is done."""


class Refused(msgspec.Struct, array_like=True, tag=3):
    """Broker → client: a subscription (by number) or a publish (None) is not permitted."""

    subscription: int | None
    reason: str


class Publish(msgspec.Struct, array_like=True, tag=4):
    """Client → broker."""

    subject: str
    payload: bytes
    reply: str | None


class Subscribe(msgspec.Struct, array_like=True, tag=5):
    """Client → broker; confirmed by the answer to the next `Ping`, unless `Refused` comes first."""

    number: int
    pattern: str
    queue_group: str | None


class Unsubscribe(msgspec.Struct, array_like=True, tag=6):
    """Client → broker."""

    number: int


class Ping(msgspec.Struct, array_like=True, tag=7):
    """Client → broker."""


FromBroker = Hello | Deliver | Pong | Refused
FromClient = Publish | Subscribe | Unsubscribe | Ping


def encode(frame: FromBroker | FromClient) -> bytes:
    """One frame with its length in front."""
    body = msgspec.msgpack.encode(frame)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class FrameReader(Generic[T]):
    """Cuts a byte stream into frames.

    Args:
        decoder: of the frames of this direction.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """The frames that are complete with `data`.

        Raises:
            msgspec.DecodeError: the peer sends something else.
        """
        self._buffer += data
        begin = 0
        while len(self._buffer) - begin >= _LENGTH_BYTES:
            body = begin + _LENGTH_BYTES
            end = body + int.from_bytes(self._buffer[begin:body], "little")
            if end > len(self._buffer):
                break
            frame = self._decoder.decode(bytes(self._buffer[body:end]))
            begin = end
            yield frame
        del self._buffer[:begin]
