"""The client's side: connections to the broker that outlive its restarts.

Owns: dialling, reconnecting for ever, subscriptions, and turning frames into messages and events of one queue.
Does not know: routing, which is the broker's.
"""

from __future__ import annotations

import asyncio
import time

import anyio
import anyio.lowlevel
from busllm_bus_unix.frames import Deliver, Refused
from busllm_bus_unix.link import Link

from busllm.bus.inbox import Inbox
from busllm.bus.matching import check_pattern, check_subject
from busllm.bus.protocol import BusEvent, Disconnected, Message, PermissionRefused, Reconnected, Subscription
from busllm.bus.queue import IncomingQueue, QueueBounds
from busllm.bus.retry import RetryPace, RetryTimings
from busllm.errors import BusDown, BusPermissionDenied, PayloadTooLarge
from busllm.telemetry.logging import get_logger

_INBOX_NUMBER = 0
_PING_INTERVAL_S = 1.0
_CLOSE_TIMEOUT_S = 2.0


class UnixBus:
    """A bus at a socket; implements `busllm.bus.protocol.Bus`.

    Args:
        path: of the broker's socket.
        max_payload_bytes: a limit below the broker's own.
        bounds: how much may wait on each connection.
        retry: pauses between attempts to connect.
    """

    def __init__(
        self,
        path: str,
        *,
        max_payload_bytes: int | None = None,
        bounds: QueueBounds | None = None,
        retry: RetryTimings | None = None,
    ) -> None:
        self.path = path
        self.max_payload_bytes = max_payload_bytes
        self.bounds = bounds or QueueBounds()
        self.retry = retry or RetryTimings()

    @property
    def address(self) -> str:
        """The socket's URL."""
        return f"unix://{self.path}"

    async def connect(self, *, name: str, inbox: str) -> UnixConnection:
        """Connects, trying for as long as it takes."""
        check_subject(inbox)
        connection = UnixConnection(self, name, inbox)
        await connection.open()
        return connection


class UnixConnection:
    """One actor's connection; implements `busllm.bus.protocol.Connection`. Made by `UnixBus.connect`.

    Args:
        bus: where to connect.
        name: for logs.
        inbox: subject prefix for replies.
    """

    def __init__(self, bus: UnixBus, name: str, inbox: str) -> None:
        self._bus = bus
        self._name = name
        self._log = get_logger("busllm.bus", bus=bus.address, connection=name)
        self._inbox = Inbox(inbox)
        self._queue = IncomingQueue(bus.bounds)
        self._subscriptions = {_INBOX_NUMBER: Subscription(_INBOX_NUMBER, self._inbox.pattern)}
        self._refusals: dict[int, str] = {}
        self._num_subscribed = 0
        self._link: Link | None = None
        self._max_payload_bytes = 0
        self._down_reason = "not connected yet"
        self._is_closed = False
        self._keeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connects for the first time and begins to keep the connection."""
        self._link = await self._dial(RetryPace(self._bus.retry))
        self._keeper = asyncio.create_task(self._keep(), name=f"bus connection of {self._name}")

    # ---------------------------------------------------------------- what an actor calls

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that `publish` takes."""
        return self._max_payload_bytes

    @property
    def is_connected(self) -> bool:
        """Whether `publish` would hand a message over now."""
        return self._link is not None

    @property
    def inbox(self) -> str:
        """Subject prefix of this connection's own inbox."""
        return self._inbox.prefix

    def publish(self, subject: str, payload: bytes, reply: str | None = None) -> None:
        """Hands one message over."""
        check_subject(subject)
        if reply is not None:
            check_subject(reply)
        if len(payload) > self._max_payload_bytes:
            raise PayloadTooLarge(len(payload), self._max_payload_bytes, subject)
        self._connected().publish(subject, payload, reply)

    async def subscribe(self, pattern: str, *, queue_group: str | None = None) -> Subscription:
        """Subscribes and waits for the broker's word."""
        check_pattern(pattern, queue_group)
        link = self._connected()
        self._num_subscribed += 1
        subscription = Subscription(self._num_subscribed, pattern, queue_group)
        self._subscriptions[subscription.number] = subscription
        is_in_force = False
        try:
            link.subscribe(subscription)
            await link.ping()
            reason = self._refusals.pop(subscription.number, None)
            if reason is not None:
                raise BusPermissionDenied(f"the broker refuses {pattern!r}: {reason}.")
            is_in_force = True
        finally:
            if not is_in_force:
                self._forget(subscription)
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Ends a subscription and forgets what waits of it."""
        self._forget(subscription)
        await anyio.lowlevel.cancel_shielded_checkpoint()

    def _forget(self, subscription: Subscription) -> None:
        if self._subscriptions.pop(subscription.number, None) is not None:
            self._queue.discard([subscription.number])
            if self._link is not None:
                self._link.unsubscribe(subscription.number)

    async def receive(self) -> list[Message | BusEvent]:
        """Waits for at least one item and returns all that are ready."""
        return await self._queue.receive()

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Publishes a request and returns the first reply's payload."""
        return await self._inbox.request(self.publish, subject, payload, timeout_s)

    async def flush(self) -> None:
        """Waits until the broker has everything published so far."""
        await self._connected().ping()

    async def close(self) -> None:
        """Flushes, for at most two seconds, and ends the connection."""
        if self._is_closed:
            return
        self._is_closed = True
        link, self._link = self._link, None
        self._down_reason = "the connection was closed"
        self._inbox.fail_all(self._down_reason)
        self._queue.close()
        with anyio.CancelScope(shield=True):
            if self._keeper is not None:
                self._keeper.cancel()
                await asyncio.wait([self._keeper])
            if link is not None:
                try:
                    with anyio.move_on_after(_CLOSE_TIMEOUT_S):
                        await link.ping()
                except BusDown as lost:
                    self._log.info("bus_lost_while_closing", cause=str(lost))
                link.close("the connection was closed")

    def _connected(self) -> Link:
        if self._link is None:
            raise BusDown(f"the bus is not connected: {self._down_reason}.")
        return self._link

    # ---------------------------------------------------------------- what a link tells

    def on_deliver(self, frame: Deliver) -> None:
        """A message arrived."""
        message = Message(frame.subject, frame.payload, frame.reply, frame.subscription, frame.no_responders)
        if frame.subscription == _INBOX_NUMBER:
            self._inbox.deliver(message)
        elif frame.subscription in self._subscriptions:
            self._queue.put(message)

    def on_refused(self, frame: Refused) -> None:
        """The broker refused a subscription, which `subscribe` raises, or a publish."""
        if frame.subscription is None:
            self._queue.tell(PermissionRefused(frame.reason))
        else:
            self._refusals[frame.subscription] = frame.reason

    def on_lost(self, link: Link, reason: str) -> None:
        """The link is over."""
        if link is self._link:
            self._link = None
            self._down_reason = reason
            self._log.warning("bus_lost", cause=reason)
            self._inbox.fail_all(f"the bus connection was lost: {reason}.")
            self._queue.tell(Disconnected(reason))

    # ---------------------------------------------------------------- keeping it

    async def _keep(self) -> None:
        while True:
            pace = RetryPace(self._bus.retry)
            if self._link is not None:
                await self._link.watch(_PING_INTERVAL_S)
            lost_at = time.monotonic()
            await anyio.sleep(pace.next_pause_s())
            self._link = await self._dial(pace)
            self._queue.tell(Reconnected(time.monotonic() - lost_at))

    def _tell_refusals(self) -> None:
        for reason in self._refusals.values():
            self._queue.tell(PermissionRefused(reason))
        self._refusals.clear()

    async def _dial(self, pace: RetryPace) -> Link:
        """Tries until a link stands with all subscriptions in force."""
        while True:
            link = Link(self, self._bus.bounds.max_outgoing_bytes)
            try:
                broker_limit = await link.open(self._bus.path)
                for subscription in self._subscriptions.values():
                    link.subscribe(subscription)
                await link.ping()
                self._tell_refusals()
            except (OSError, BusDown) as error:
                if pace.is_time_to_log():
                    self._log.warning("bus_unreachable", url=self._bus.address, cause=str(error))
            else:
                own_limit = self._bus.max_payload_bytes
                self._max_payload_bytes = broker_limit if own_limit is None else min(own_limit, broker_limit)
                return link
            await anyio.sleep(pace.next_pause_s())
