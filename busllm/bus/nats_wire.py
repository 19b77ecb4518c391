"""What busllm asks of nats-py, and the one place that touches its private names.

Owns: `WireTransport`, the byte stream of one session, and `WireClient`, a nats-py client that hands every message and
pong straight on.
Does not know: subscriptions, reconnecting, queues (`bus/nats_session.py`, `bus/nats.py`).
Next on the path: `bus/nats_session.py`.

nats-py does what is long to do right: URLs, the handshake, TLS, tokens, passwords and nkeys, parsing, server errors.
The data path is ours, because nats-py's own
- runs one queue and one task per subscription, so that two subscriptions are handled in any order;
- drops messages of a full subscription with a word to the error callback only;
- keeps what could not be sent and sends it after a reconnect;
- waits in `publish` and while closing for a peer that does not read;
- stops reading for good when a pong arrives for a flush that was given up.

Private names of nats-py 2.16 in use: the attribute `Client._transport`, the methods `Client._process_msg` and
`Client._process_pong`, which its parser calls. `tests/bus/test_nats_wire.py` fails when one of them goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import ParseResult

from nats.aio.client import Client
from nats.aio.transport import Transport

_READ_BUFFER_BYTES = 256 * 1024
_SEND_AT_BYTES = 64 * 1024
_UNACKNOWLEDGED_LIMIT_MS = 2000
_NO_RESPONDERS_HEADER = b"NATS/1.0 503"

OnMessage = Callable[[int, str, bytes, str | None, bool], None]


class WireTransport(Transport):
    """A TCP or TLS stream that never makes a writer wait.

    What is written in one turn of the event loop leaves in one system call; a batch that grows past 64 KiB leaves at
    once. Whoever writes bounds itself by `pending_bytes`.

    Args:
        must_encrypt: refuse to write anything before TLS is established.
    """

    def __init__(self, must_encrypt: bool) -> None:
        self._must_encrypt = must_encrypt
        self._is_encrypted = False
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._plain_writer: asyncio.StreamWriter | None = None  # under TLS; collecting it would close the socket
        self._batch: list[bytes] = []
        self._batch_bytes = 0

    def __bool__(self) -> bool:
        """True: nats-py makes a transport of its own where this is false."""
        return True

    @property
    def pending_bytes(self) -> int:
        """Bytes that were written and that the kernel has not taken yet."""
        if self._writer is None:
            return self._batch_bytes
        return self._batch_bytes + self._writer.transport.get_write_buffer_size()

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Opens the TCP stream."""
        async with asyncio.timeout(connect_timeout):
            self._reader, self._writer = await asyncio.open_connection(
                uri.hostname, uri.port, limit=max(buffer_size, _READ_BUFFER_BYTES)
            )
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: else a host that vanished is missed for many minutes
            stream_socket = self._writer.get_extra_info("socket")
            stream_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_LIMIT_MS)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        """Turns the open stream into a TLS stream."""
        assert self._writer is not None, "connect comes first"
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=max(buffer_size, _READ_BUFFER_BYTES), loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        hostname = uri if isinstance(uri, str) else uri.hostname
        self._plain_writer = self._writer
        transport = await loop.start_tls(
            self._writer.transport,
            protocol,
            ssl_context,
            server_hostname=hostname,
            ssl_handshake_timeout=connect_timeout,
        )
        assert transport is not None
        protocol.connection_made(transport)
        self._reader, self._writer = reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        self._is_encrypted = True

    def write(self, payload: bytes) -> None:
        """Adds bytes to the batch; a stream that is closing swallows them."""
        if self._must_encrypt and not self._is_encrypted:
            raise ConnectionError("the server offers no TLS, which is demanded; no credentials were sent")
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._send_batch)
        self._batch.append(payload)
        self._batch_bytes += len(payload)
        if self._batch_bytes >= _SEND_AT_BYTES:
            self._send_batch()

    def writelines(self, payload: list[bytes]) -> None:
        """Adds several pieces to the batch."""
        self.write(b"".join(payload))

    def _send_batch(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if batch and self._writer is not None and not self._writer.is_closing():
            self._writer.write(b"".join(batch))

    async def drain(self) -> None:
        """Hands the batch to the kernel, as far as it takes it. Does not wait."""
        self._send_batch()

    async def read(self, buffer_size: int) -> bytes:
        """Up to 256 KiB; `buffer_size` is nats-py's smaller default."""
        assert self._reader is not None, "connect comes first"
        return await self._reader.read(_READ_BUFFER_BYTES)

    async def readline(self) -> bytes:
        """One protocol line."""
        assert self._reader is not None, "connect comes first"
        return await self._reader.readline()

    def close(self) -> None:
        """Drops the stream with whatever was not sent: waiting for a frozen peer would never end."""
        self._batch, self._batch_bytes = [], 0
        if self._writer is not None:
            self._writer.transport.abort()

    async def wait_closed(self) -> None:
        """Waits until the socket is closed, which a dropped stream is at once."""
        if self._writer is not None:
            with contextlib.suppress(OSError):  # the reason of the loss was told by the reading side
                await self._writer.wait_closed()

    def at_eof(self) -> bool:
        """Whether the peer has closed and everything was read."""
        return self._reader is None or self._reader.at_eof()


class WireClient(Client):
    """A nats-py client for one session, which it ends instead of reconnecting.

    Args:
        transport: its byte stream.
        on_message: called in order of arrival with subscription number, subject, payload, reply subject and whether it
            is the server's "no responders".
    """

    def __init__(self, transport: WireTransport, on_message: OnMessage) -> None:
        super().__init__()
        self._transport = transport
        self._on_message = on_message
        self._awaited_pongs: deque[Callable[[], None]] = deque()

    def expect_pong(self, on_pong: Callable[[], None]) -> None:
        """Calls `on_pong` when the next unclaimed ping is answered; the server answers in order."""
        self._awaited_pongs.append(on_pong)

    async def _process_pong(self) -> None:
        if self._awaited_pongs:
            self._awaited_pongs.popleft()()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        is_no_responders = headers is not None and headers.startswith(_NO_RESPONDERS_HEADER)
        # Anyone may publish on a subject that is no UTF-8; that must not end the reading.
        reply_subject = reply.decode(errors="backslashreplace") if reply else None
        self._on_message(sid, subject.decode(errors="backslashreplace"), data, reply_subject, is_no_responders)


def connect_arguments(**arguments: Any) -> dict[str, Any]:
    """The arguments of `Client.connect` that make a `WireClient` what it is, joined with the caller's."""
    never_s = 10**9
    return {
        "allow_reconnect": False,
        "ping_interval": never_s,  # `NatsSession` pings
        "pending_size": -1,  # nothing is buffered for a later session
        **arguments,
    }
