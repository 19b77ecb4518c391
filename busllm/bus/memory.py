"""The bus of one process.

Owns: routing between the connections of one `MemoryBus`. A real bus: payloads are the encoded bytes, queues are
bounded, wildcards, queue groups, requests and "no responders" mean what they mean on NATS.
Does not know: sockets. A message is in the receivers' queues when `publish` returns, so nothing ever waits to be sent,
and the bus cannot be lost (`busllm.testing.faulty_bus` makes one that can).
Next on the path: `bus/queue.py`, from which the receiving actor reads.
"""

from __future__ import annotations

import anyio.lowlevel
import msgspec

from busllm.bus.inbox import Inbox
from busllm.bus.matching import SubjectTree, check_pattern, check_subject
from busllm.bus.protocol import BusEvent, Message, Subscription
from busllm.bus.queue import IncomingQueue, QueueBounds
from busllm.errors import BusDown, PayloadTooLarge

DEFAULT_MAX_PAYLOAD_BYTES = 8 * 2**20
_INBOX_NUMBER = 0  # the connection's own subscription; an actor's are numbered from 1


class _Route(msgspec.Struct, frozen=True, eq=False):
    """Who subscribed, as what."""

    connection: MemoryConnection
    subscription: Subscription


class MemoryBus:
    """A bus between the actors of one process; implements `Bus`.

    Args:
        max_payload_bytes: the largest payload that may be published.
        bounds: how much may wait on each connection; its outgoing bound has nothing to bound here.
    """

    def __init__(
        self, *, max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES, bounds: QueueBounds | None = None
    ) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.bounds = bounds or QueueBounds()  # of the connections that are made from now on
        self._routes: SubjectTree[_Route] = SubjectTree()
        self._num_grouped = 0

    @property
    def address(self) -> str:
        """Always "memory"."""
        return "memory"

    async def connect(self, *, name: str, inbox: str) -> MemoryConnection:
        """Makes a connection at once.

        Raises:
            BadSubject: `inbox` is not a subject.
        """
        check_subject(inbox)
        await anyio.lowlevel.checkpoint()
        return MemoryConnection(self, inbox, self.bounds)

    def add_route(self, connection: MemoryConnection, subscription: Subscription) -> _Route:
        """Puts a subscription in force."""
        route = _Route(connection, subscription)
        self._routes.add(subscription.pattern, route)
        return route

    def remove_route(self, route: _Route) -> None:
        """Ends a subscription."""
        self._routes.remove(route.subscription.pattern, route)

    def route(self, sender: MemoryConnection, subject: str, payload: bytes, reply: str | None) -> None:
        """Hands one message to every subscription that matches, and to one of each queue group."""
        routes = self._routes.match(subject)
        if not routes:
            if reply is not None:
                self._return_to(sender, reply)
            return
        groups: dict[str, list[_Route]] = {}
        for route in routes:
            if route.subscription.queue_group is None:
                route.connection.deliver(Message(subject, payload, reply, route.subscription.number))
            else:
                groups.setdefault(route.subscription.queue_group, []).append(route)
        for members in groups.values():
            self._num_grouped += 1
            member = members[self._num_grouped % len(members)]
            member.connection.deliver(Message(subject, payload, reply, member.subscription.number))

    def _return_to(self, sender: MemoryConnection, reply: str) -> None:
        """Tells the publisher, if it listens to its own reply subject, that nobody was reached."""
        for route in self._routes.match(reply):
            if route.connection is sender:
                sender.deliver(Message(reply, b"", None, route.subscription.number, no_responders=True))
                return


class MemoryConnection:
    """One actor's connection to a `MemoryBus`; implements `Connection`.

    Args:
        bus: the bus that made it.
        inbox: subject prefix for replies.
        bounds: how much may wait.
    """

    def __init__(self, bus: MemoryBus, inbox: str, bounds: QueueBounds) -> None:
        self._bus = bus
        self._inbox = Inbox(inbox)
        self._queue = IncomingQueue(bounds)
        self._routes: dict[int, _Route] = {}
        self._num_subscribed = 0
        self._down_reason: str | None = None
        self._is_closed = False
        own = Subscription(_INBOX_NUMBER, self._inbox.pattern)
        self._routes[_INBOX_NUMBER] = bus.add_route(self, own)

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that `publish` takes."""
        return self._bus.max_payload_bytes

    @property
    def is_connected(self) -> bool:
        """Whether `publish` would hand a message over now."""
        return self._down_reason is None

    @property
    def inbox(self) -> str:
        """Subject prefix of this connection's own inbox."""
        return self._inbox.prefix

    def publish(self, subject: str, payload: bytes, reply: str | None = None) -> None:
        """Puts one message into the queues of its receivers."""
        check_subject(subject)
        if reply is not None:
            check_subject(reply)
        if len(payload) > self._bus.max_payload_bytes:
            raise PayloadTooLarge(len(payload), self._bus.max_payload_bytes, subject)
        self._check_connected()
        self.send(subject, bytes(payload), reply)

    def send(self, subject: str, payload: bytes, reply: str | None) -> None:
        """Routes a checked message."""
        self._bus.route(self, subject, payload, reply)

    async def subscribe(self, pattern: str, *, queue_group: str | None = None) -> Subscription:
        """Subscribes; in force when it returns."""
        subscription = self.subscribe_now(pattern, queue_group)
        await anyio.lowlevel.cancel_shielded_checkpoint()
        return subscription

    def subscribe_now(self, pattern: str, queue_group: str | None) -> Subscription:
        """`subscribe` without giving others a turn, for code that serves connections from callbacks."""
        check_pattern(pattern, queue_group)
        self._check_connected()
        self._num_subscribed += 1
        subscription = Subscription(self._num_subscribed, pattern, queue_group)
        self._routes[subscription.number] = self._bus.add_route(self, subscription)
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Ends a subscription and forgets what waits of it; one that has ended already is left alone."""
        self.unsubscribe_now(subscription.number)
        await anyio.lowlevel.cancel_shielded_checkpoint()

    def unsubscribe_now(self, number: int) -> None:
        """`unsubscribe` without giving others a turn, by the subscription's number."""
        route = self._routes.pop(number, None)
        if route is not None:
            self._bus.remove_route(route)
            self._queue.discard([number])

    async def receive(self) -> list[Message | BusEvent]:
        """Waits for at least one item and returns all that are ready."""
        return await self._queue.receive()

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Publishes a request and returns the first reply's payload."""
        return await self._inbox.request(self.publish, subject, payload, timeout_s)

    async def flush(self) -> None:
        """Only gives others a turn: what was published is in the queues already."""
        self._check_connected()
        await anyio.lowlevel.checkpoint()

    async def close(self) -> None:
        """Ends the connection."""
        self.close_now()
        await anyio.lowlevel.cancel_shielded_checkpoint()

    def close_now(self) -> None:
        """`close` without giving others a turn."""
        if self._is_closed:
            return
        self._is_closed = True
        for route in self._routes.values():
            self._bus.remove_route(route)
        self._routes.clear()
        self._down_reason = "the connection was closed."
        self._inbox.fail_all(self._down_reason)
        self._queue.close()

    def deliver(self, message: Message) -> None:
        """Takes in one message from the bus."""
        if message.subscription == _INBOX_NUMBER:
            self._inbox.deliver(message)
        else:
            self._queue.put(message)

    def _check_connected(self) -> None:
        if self._down_reason is not None:
            raise BusDown(self._down_reason)
