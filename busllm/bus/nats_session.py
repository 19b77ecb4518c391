"""One session with a NATS server, from dialling to its loss.

Owns: one attempt to connect, the frames of publishing and subscribing, pings, and telling
the owner once that the session is lost. A session is never revived; nothing that it could not send survives it.
Does not know: reconnecting and the subscriptions that outlive a session (`bus/nats.py`).
Next on the path: `bus/nats_wire.py`, the byte stream.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from typing import Protocol

import anyio
import nats.errors

from busllm.bus.nats_options import NatsOptions
from busllm.bus.nats_wire import WireClient, WireTransport, connect_arguments
from busllm.bus.protocol import Subscription
from busllm.errors import BusCongested, BusDown, BusPermissionDenied

_MAX_UNANSWERED_PINGS = 2
_AUTHENTICATION = re.compile(r"authorization violation|authentication (expired|revoked)", re.IGNORECASE)
_REFUSED_SUBSCRIPTION = re.compile(r'permissions violation for subscription to "([^"]+)"', re.IGNORECASE)


class Unreachable(BusDown):
    """One attempt to connect failed; another one may succeed."""


class SessionOwner(Protocol):
    """Whom a session tells what happens to it, without ever waiting."""

    def on_message(self, number: int, subject: str, payload: bytes, reply: str | None, is_no_responders: bool) -> None:
        """A message arrived on the subscription with that number."""
        ...

    def on_refused(self, reason: str) -> None:
        """The server refused a publish."""
        ...

    def on_lost(self, session: NatsSession, reason: str) -> None:
        """The session is over. Told once."""
        ...


class _Pending:
    """A subscription whose confirmation is awaited."""

    __slots__ = ("pattern", "refusal")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern.lower()  # nats-py hands on the server's errors in lower case
        self.refusal: str | None = None


class NatsSession:
    """One connected stretch of a connection.

    Args:
        options: how to connect.
        tls_context: as made from the options, or None to take the system's authorities when TLS is demanded.
        owner: whom to tell.
    """

    def __init__(self, options: NatsOptions, tls_context: ssl.SSLContext | None, owner: SessionOwner) -> None:
        self._options = options
        self._tls_context = tls_context
        self._owner = owner
        self._max_outgoing_bytes = options.bounds.max_outgoing_bytes
        self._transport = WireTransport(options.must_encrypt)
        self._client = WireClient(self._transport, owner.on_message)
        self._is_dialling = True
        self._lost_reason: str | None = None
        self._waiting: set[anyio.Event] = set()
        self._subscribing: list[_Pending] = []
        self._num_unanswered = 0

    @property
    def max_payload_bytes(self) -> int:
        """The smaller of the server's limit and the configured one."""
        limit = self._client.max_payload
        configured = self._options.max_payload_bytes
        return limit if configured is None else min(limit, configured)

    @property
    def is_lost(self) -> bool:
        """Whether the session is over."""
        return self._lost_reason is not None

    async def open(self, url: str, name: str) -> None:
        """Makes one attempt to connect.

        Raises:
            BusPermissionDenied: the server refuses the credentials.
            Unreachable: anything else, with the cause.
        """
        tls = self._options.tls
        try:
            await self._client.connect(
                **connect_arguments(
                    servers=[url],
                    name=name,
                    connect_timeout=self._options.connect_timeout_s,
                    error_cb=self._on_error,
                    closed_cb=self._on_closed,
                    user_credentials=self._options.credentials_file,
                    tls=self._tls_context,
                    tls_hostname=tls.server_name if tls else None,
                    tls_handshake_first=tls.handshake_first if tls else False,
                )
            )
        except (OSError, ValueError, nats.errors.Error) as error:
            raise self._translated(error) from error
        finally:
            self._is_dialling = False
            if not self._client.is_connected:
                self._transport.close()
        if not self._client.is_connected:  # nats-py takes the end of the stream for the end of the handshake
            await self._client.close()
            raise Unreachable("the server closed the connection before it was established")

    def _translated(self, error: Exception) -> BusDown | BusPermissionDenied:
        text = _plain(error)
        if _AUTHENTICATION.search(text):
            return BusPermissionDenied(f"the bus server refuses the credentials: {text}.")
        if isinstance(error, TimeoutError) and not text:
            text = f"no answer within {self._options.connect_timeout_s} s"
        return Unreachable(text or type(error).__name__)

    def publish(self, subject: str, payload: bytes, reply: str | None) -> None:
        """Adds one message to what leaves in this turn of the event loop. The subjects have been checked.

        Raises:
            BusCongested: too much waits already. A message may exceed the bound when it finds less waiting.
        """
        transport = self._transport
        pending_bytes = transport.pending_bytes
        if pending_bytes >= self._max_outgoing_bytes:
            raise BusCongested(pending_bytes, self._max_outgoing_bytes)
        frame = f"PUB {subject} {reply or ''} {len(payload)}\r\n"
        transport.write(b"".join((frame.encode(), payload, b"\r\n")))

    async def subscribe(self, subscriptions: Sequence[Subscription]) -> dict[int, str]:
        """Puts subscriptions in force and waits until the server has confirmed or refused each.

        Returns:
            The refused ones: their numbers and the server's reasons.

        Raises:
            BusDown: the session was lost meanwhile.
        """
        pending = {subscription.number: _Pending(subscription.pattern) for subscription in subscriptions}
        self._subscribing.extend(pending.values())
        try:
            for subscription in subscriptions:
                group = subscription.queue_group or ""
                self._transport.write(f"SUB {subscription.pattern} {group} {subscription.number}\r\n".encode())
            await self.ping()
        finally:
            self._subscribing = [item for item in self._subscribing if item not in pending.values()]
        return {number: item.refusal for number, item in pending.items() if item.refusal is not None}

    def unsubscribe(self, number: int) -> None:
        """Tells the server that a subscription has ended."""
        self._transport.write(f"UNSUB {number}\r\n".encode())

    async def ping(self) -> None:
        """Waits until the server has processed everything sent before.

        Raises:
            BusDown: the session is or was lost.
        """
        answered = anyio.Event()
        self._waiting.add(answered)
        try:
            if self._lost_reason is None:
                self._client.expect_pong(answered.set)
                self._transport.write(b"PING\r\n")
                await answered.wait()
        finally:
            self._waiting.discard(answered)
        if self._lost_reason is not None:
            raise BusDown(self._lost_reason)

    def keep_alive(self) -> None:
        """Sends the regular ping; ends the session when the last two were not answered. Called once per interval."""
        if self._num_unanswered >= _MAX_UNANSWERED_PINGS:
            self._lose(f"the server did not answer {_MAX_UNANSWERED_PINGS} pings")
            return
        self._num_unanswered += 1
        self._client.expect_pong(self._on_alive)
        self._transport.write(b"PING\r\n")

    async def close(self) -> None:
        """Ends the session at once. Never waits for the server."""
        self._lose("the connection was closed")
        await self._client.close()

    def _on_alive(self) -> None:
        self._num_unanswered = 0

    async def _on_error(self, error: Exception) -> None:
        """nats-py's error callback."""
        if self._is_dialling:
            raise error  # else nats-py would go on trying in a loop of its own, without a pause
        text = _plain(error)
        refused = _REFUSED_SUBSCRIPTION.search(text)
        if refused is not None:
            for item in self._subscribing:
                if item.pattern == refused[1].lower():
                    item.refusal = text
        elif "permissions violation" in text.lower():
            self._owner.on_refused(text)

    async def _on_closed(self) -> None:
        """nats-py's word that it has closed, for whatever reason."""
        error = self._client.last_error
        is_plain_end = error is None or isinstance(error, nats.errors.UnexpectedEOF)
        self._lose("the server closed the connection" if is_plain_end else _plain(error))

    def _lose(self, reason: str) -> None:
        if self._lost_reason is not None:
            return
        self._lost_reason = reason
        self._transport.close()
        for event in self._waiting:
            event.set()
        self._owner.on_lost(self, reason)


def _plain(error: Exception | None) -> str:
    return str(error).removeprefix("nats: ").strip("'")
