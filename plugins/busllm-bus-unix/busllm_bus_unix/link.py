"""One session with the broker, from dialling to its loss.

Owns: the socket, what waits to be sent, pings.
Does not know: reconnecting and the subscriptions that outlive a session (`bus.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol, assert_never

import anyio
import msgspec
from busllm_bus_unix.frames import (
    Deliver,
    FrameReader,
    FromBroker,
    Hello,
    Ping,
    Pong,
    Publish,
    Refused,
    Subscribe,
    Unsubscribe,
    encode,
)

from busllm.bus.protocol import Subscription
from busllm.errors import BusCongested, BusDown

_OPEN_TIMEOUT_S = 2.0
_MAX_UNANSWERED_PINGS = 2


class LinkOwner(Protocol):
    """Whom a link tells what happens to it."""

    def on_deliver(self, frame: Deliver) -> None:
        """A message arrived."""
        ...

    def on_refused(self, frame: Refused) -> None:
        """The broker does not permit something."""
        ...

    def on_lost(self, link: Link, reason: str) -> None:
        """The link is over. Told once."""
        ...


class Link(asyncio.Protocol):
    """One connected stretch of a connection.

    Args:
        owner: whom to tell.
        max_outgoing_bytes: what may wait to be sent.
    """

    def __init__(self, owner: LinkOwner, max_outgoing_bytes: int) -> None:
        self._owner = owner
        self._max_outgoing_bytes = max_outgoing_bytes
        self._reader = FrameReader(msgspec.msgpack.Decoder(FromBroker))
        self._transport: asyncio.WriteTransport | None = None
        self._max_payload_bytes = 0
        self._greeted = anyio.Event()
        self._lost = anyio.Event()
        self._lost_reason = ""
        self._pings: deque[anyio.Event] = deque()

    async def open(self, path: str) -> int:
        """Makes one attempt to connect and returns the broker's payload limit.

        Raises:
            OSError: there is no broker at that path.
            BusDown: it says nothing.
        """
        await asyncio.get_running_loop().create_unix_connection(lambda: self, path)
        with anyio.move_on_after(_OPEN_TIMEOUT_S):
            await self._greeted.wait()
        if not self._max_payload_bytes:
            self.close(f"no greeting within {_OPEN_TIMEOUT_S:g} s")
            raise BusDown(self._lost_reason)
        return self._max_payload_bytes

    def publish(self, subject: str, payload: bytes, reply: str | None) -> None:
        """Sends a message.

        Raises:
            BusCongested: too much waits already.
        """
        pending_bytes = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if pending_bytes >= self._max_outgoing_bytes:
            raise BusCongested(pending_bytes, self._max_outgoing_bytes)
        self._send(Publish(subject, payload, reply))

    def subscribe(self, subscription: Subscription) -> None:
        """Asks for a subscription; the next ping's answer confirms it."""
        self._send(Subscribe(subscription.number, subscription.pattern, subscription.queue_group))

    def unsubscribe(self, number: int) -> None:
        """Ends a subscription."""
        self._send(Unsubscribe(number))

    async def ping(self) -> None:
        """Waits until the broker has handled everything sent before.

        Raises:
            BusDown: the link is or was lost.
        """
        await self._send_ping().wait()
        if self._lost.is_set():
            raise BusDown(self._lost_reason)

    async def watch(self, interval_s: float) -> None:
        """Pings regularly and returns when the link is lost: by its end, or by two unanswered pings."""
        unanswered: deque[anyio.Event] = deque()
        while not self._lost.is_set():
            while unanswered and unanswered[0].is_set():
                unanswered.popleft()
            if len(unanswered) >= _MAX_UNANSWERED_PINGS:
                self.close(f"the broker did not answer {_MAX_UNANSWERED_PINGS} pings")
                return
            unanswered.append(self._send_ping())
            with anyio.move_on_after(interval_s):
                await self._lost.wait()

    def close(self, reason: str) -> None:
        """Ends the link at once, with what waits to be sent."""
        if self._lost.is_set():
            return
        self._lost_reason = reason
        self._lost.set()
        self._greeted.set()
        for event in self._pings:
            event.set()
        if self._transport is not None:
            self._transport.abort()
        self._owner.on_lost(self, reason)

    def _send_ping(self) -> anyio.Event:
        answered = anyio.Event()
        if self._lost.is_set():
            answered.set()
        else:
            self._pings.append(answered)
            self._send(Ping())
        return answered

    def _send(self, frame: Publish | Subscribe | Unsubscribe | Ping) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(frame))

    # ---------------------------------------------------------------- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        try:
            for frame in self._reader.feed(data):
                self._handle(frame)
        except msgspec.DecodeError as error:
            self.close(f"what listens there is no broker: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        """The socket is closed."""
        self.close(str(error) if error is not None else "the broker closed the connection")

    def _handle(self, frame: FromBroker) -> None:
        match frame:
            case Deliver():
                self._owner.on_deliver(frame)
            case Pong():
                if self._pings:
                    self._pings.popleft().set()
            case Refused():
                self._owner.on_refused(frame)
            case Hello(max_payload_bytes=limit):
                self._max_payload_bytes = limit
                self._greeted.set()
            case _:
                assert_never(frame)
