"""One HTTP/1.1 request over a socket of its own, its answer in the pieces in which it arrives.

Owns: as much of HTTP/1.1 (RFC 9112) as the answer to one POST needs: status line, header fields, the three ways in
which a body ends.
Does not know: events (`cli/event_stream.py`).

A general client spends more time on each piece than the stages of a fast server do; this one is measured by
`ceiling.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio
import anyio.abc
import msgspec

from busllm.cli.http_target import HttpFailure, HttpTarget

_MAX_HEAD_BYTES = 64 * 1024
_RECEIVE_BYTES = 256 * 1024
_HTTPS_PORT, _HTTP_PORT = 443, 80


class Address(msgspec.Struct, frozen=True):
    """Where a URL leads."""

    host: str
    port: int
    tls: bool
    prefix: str
    authority: str

    @classmethod
    def of(cls, url: str) -> Address:
        """Takes a checked URL apart."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        port = parts.port or (_HTTPS_PORT if tls else _HTTP_PORT)
        return cls(parts.hostname or "", port, tls, parts.path.rstrip("/"), parts.netloc.rpartition("@")[2])


class StreamedAnswer:
    """An answer: its status, and its body piece by piece."""

    def __init__(self, status: int, fields: dict[str, str], stream: anyio.abc.ByteReceiveStream, begun: bytes) -> None:
        self.status = status
        self._fields = fields
        self._stream = stream
        self._begun = begun

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body.

        Raises:
            HttpFailure: it ends too early, or its framing is wrong.
        """
        if "chunked" in self._fields.get("transfer-encoding", "").lower():
            unframe = Unchunked()
            async for received in self._received():
                data = unframe.feed(received)
                if data:
                    yield data
                if unframe.is_complete:
                    return
            raise HttpFailure("The connection ended inside the answer.")
        left = self._fields.get("content-length")
        missing = int(left) if left is not None else None
        if missing == 0:
            return
        async for received in self._received():
            yield received
            if missing is not None:
                missing -= len(received)
                if missing <= 0:
                    return
        if missing is not None:
            raise HttpFailure("The connection ended inside the answer.")

    async def _received(self) -> AsyncIterator[bytes]:
        if self._begun:
            yield self._begun
        while True:
            try:
                yield await self._stream.receive(_RECEIVE_BYTES)
            except anyio.EndOfStream:
                return


class Unchunked:
    """Takes the chunks of RFC 9112, section 7.1, out of their frames."""

    def __init__(self) -> None:
        self._rest = b""
        self._missing = 0  # of the chunk that is under way, its CRLF included
        self.is_complete = False

    def feed(self, received: bytes) -> bytes:
        """The data in `received`.

        Raises:
            HttpFailure: no chunk begins where one must.
        """
        text, at, data = self._rest + received if self._rest else received, 0, []
        self._rest = b""
        while at < len(text) and not self.is_complete:
            if not self._missing:
                line_end = text.find(b"\r\n", at)
                if line_end < 0:
                    self._rest = text[at:]
                    break
                size = self._size(text[at:line_end])
                at, self._missing, self.is_complete = line_end + 2, size + 2, size == 0
                continue
            taken = min(self._missing, len(text) - at)
            data.append(text[at : at + max(0, min(taken, self._missing - 2))])
            at, self._missing = at + taken, self._missing - taken
        return b"".join(data)

    @staticmethod
    def _size(line: bytes) -> int:
        try:
            return int(line.partition(b";")[0], 16)
        except ValueError as error:
            raise HttpFailure(f"The answer's framing is wrong: {line[:40]!r} is no chunk size.") from error


@asynccontextmanager
async def post(target: HttpTarget, path: str, body: bytes) -> AsyncIterator[StreamedAnswer]:
    """Sends one request on a connection of its own; leaving the block closes it.

    Raises:
        HttpFailure: the answer is no HTTP.
        OSError: the server cannot be reached, or the connection is lost.
        anyio.BrokenResourceError: the connection is lost.
    """
    address = Address.of(target.url)
    fields = {
        "host": address.authority,
        "content-type": "application/json",
        "content-length": str(len(body)),
        "accept": "text/event-stream",
        "connection": "close",
        **target.headers,
    }
    head = f"POST {address.prefix}{path} HTTP/1.1\r\n" + "".join(f"{key}: {value}\r\n" for key, value in fields.items())
    stream = await _connect(address)
    try:
        await stream.send(f"{head}\r\n".encode() + body)
        yield await _answer(stream)
    finally:
        await anyio.aclose_forcefully(stream)


async def _connect(address: Address) -> anyio.abc.ByteStream:
    if address.tls:
        return await anyio.connect_tcp(address.host, address.port, tls=True, tls_standard_compatible=False)
    return await anyio.connect_tcp(address.host, address.port)


async def _answer(stream: anyio.abc.ByteStream) -> StreamedAnswer:
    received = b""
    while b"\r\n\r\n" not in received:
        if len(received) > _MAX_HEAD_BYTES:
            raise HttpFailure("The server sent what is no HTTP.")
        try:
            received += await stream.receive(_RECEIVE_BYTES)
        except anyio.EndOfStream as error:
            raise HttpFailure("The server closed the connection without an answer.") from error
    head, _, begun = received.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    words = status_line.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
        raise HttpFailure("The server sent what is no HTTP.")
    fields = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return StreamedAnswer(int(words[1]), fields, stream, begun)
