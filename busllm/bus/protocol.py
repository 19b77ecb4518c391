"""The bus as its users see it: the guarantees in sentences, and the two nouns `Bus` and `Connection`.

Owns: the contract that every bus keeps. `busllm.testing.bus_conformance` has one test per numbered sentence below, and
every implementation (memory, NATS, plug-ins) passes all of them.
Does not know: what the bytes mean (`messages/`), what subjects there are (`bus/subjects.py`), who listens.
Next on the path: `bus/memory.py` and `bus/nats.py`.

Guarantees
----------
Delivery
 G1. A message published on a subject reaches every connection that subscribed to a matching pattern before; a message
     published before the subscription was made does not.
 G2. Messages that one connection publishes on one subject arrive at a subscriber in the order of publishing, as long as
     the publisher stays connected. Between different publishers there is no order. After a reconnect earlier messages
     may be missing or late.
 G3. Messages that one connection publishes on several subjects, which one subscription matches, arrive in the order of
     publishing.
 G4. At most once: no message is delivered twice to one subscription, none is kept for later, none is sent again.
 G5. Of the subscriptions that match and name the same queue group, each message reaches exactly one.
 G6. A payload arrives as the bytes that were published, the empty payload included.
Subjects
 G7. A subject is tokens joined by dots. In a pattern `*` matches exactly one token and a final `>` one or more.
 G8. Publishing to a subject (or with a reply subject) that is empty, longer than 1,024 bytes, or has an empty token,
     white space, control characters, `*` or `>` raises `BadSubject` and sends nothing.
Publishing
 G9. `publish` never waits: it hands the message over or raises.
 G10. A payload over `max_payload_bytes` raises `PayloadTooLarge` with both numbers before anything is sent, and the
      connection stays usable.
 G11. While disconnected `publish` raises `BusDown`; what was refused is never sent later.
 G12. While the outgoing bound or more waits to be sent, `publish` raises `BusCongested` with both numbers; below it a
      message of any permitted size is taken.
Receiving
 G13. `receive` returns everything that is ready, at least one item, in order of arrival: messages of all subscriptions
      of the connection and the connection's own events, in one list.
 G14. The incoming queue is bounded in messages and bytes. When it is full new messages are dropped until `receive`
      has fetched what is there; an `Overflow` event behind it tells the number. The connection stays usable.
 G15. A lost connection is told by `Disconnected`, its return by `Reconnected`; subscriptions are in force again before
      `Reconnected` is delivered. Reconnecting is tried for ever, with growing pauses and jitter.
 G16. `subscribe` returns when the subscription is in force on the whole bus server; a refused one raises
      `BusPermissionDenied`.
 G17. After `unsubscribe` returns no message of that subscription is handed to `receive` any more.
Requests
 G18. `request` returns the first reply. With no subscriber on the subject it raises `NoResponders` at once, with one
      that stays silent `ReplyTimeout` after the time given.
 G19. A `publish` with a reply subject to a subject without any subscriber comes back to its publisher as a message
      with `no_responders=True` on the reply subject, if the publishing connection itself subscribes to that; other
      connections hear nothing of it.
 G20. Replies to requests arrive at the connection's own inbox (`<inbox>.<n>`), never at a shared one.
Closing
 G21. `flush` returns when everything published before has reached the bus server (memory: the queues).
 G22. `close` ends the connection after flushing what was published; a later `publish` raises `BusDown`, a waiting or
      later `receive` raises `ConnectionClosed`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from busllm.errors import BusDown


class Message(msgspec.Struct, frozen=True, gc=False):
    """One delivered message.

    Attributes:
        subject: where it was published.
        payload: its bytes.
        reply: where an answer (or "no responders") goes, or None.
        subscription: number of the subscription that it arrived on (`Subscription.number`).
        no_responders: this is the bus's word that a publish, whose reply subject this is, reached nobody; the payload
            is empty.
    """

    subject: str
    payload: bytes
    reply: str | None
    subscription: int
    no_responders: bool = False


class Disconnected(msgspec.Struct, frozen=True):
    """The connection is lost; publishing raises `BusDown` until `Reconnected`."""

    reason: str


class Reconnected(msgspec.Struct, frozen=True):
    """The connection is back after `outage_s` seconds; messages of that time are gone."""

    outage_s: float


class Overflow(msgspec.Struct, frozen=True):
    """The incoming queue was full: `num_dropped` messages are gone."""

    num_dropped: int


class PermissionRefused(msgspec.Struct, frozen=True):
    """The server refused a publish after the fact (a subscription raises instead)."""

    reason: str


BusEvent = Disconnected | Reconnected | Overflow | PermissionRefused


class ConnectionClosed(BusDown):
    """`receive` on a connection that was closed."""

    code = "bus_closed"


class Subscription(msgspec.Struct, frozen=True):
    """A subscription in force.

    Attributes:
        number: unique within its connection; `Message.subscription` repeats it.
        pattern: the subject pattern.
        queue_group: the queue group, or None.
    """

    number: int
    pattern: str
    queue_group: str | None = None


class Connection(Protocol):
    """One actor's connection. All methods are called from the event loop that made it."""

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that `publish` takes."""
        ...

    @property
    def is_connected(self) -> bool:
        """Whether `publish` would hand a message over now."""
        ...

    @property
    def inbox(self) -> str:
        """Subject prefix of this connection's own inbox."""
        ...

    def publish(self, subject: str, payload: bytes, reply: str | None = None) -> None:
        """Hands one message to the bus; see G8 to G12.

        Raises:
            BadSubject, PayloadTooLarge, BusDown, BusCongested: nothing was sent.
        """
        ...

    async def subscribe(self, pattern: str, *, queue_group: str | None = None) -> Subscription:
        """Subscribes and waits until it is in force (G16).

        Raises:
            BadSubject: empty tokens, white space, or `>` before the end.
            BusPermissionDenied: the server refuses.
            BusDown: not connected.
        """
        ...

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Ends a subscription (G17)."""
        ...

    async def receive(self) -> list[Message | BusEvent]:
        """Waits for at least one item and returns all that are ready (G13). One task at a time may wait.

        Raises:
            ConnectionClosed: the connection was closed here.
        """
        ...

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Publishes with a reply subject in the own inbox and returns the first answer's payload (G18, G20).

        Answers do not pass through `receive`.

        Raises:
            NoResponders, ReplyTimeout, and what `publish` raises.
        """
        ...

    async def flush(self) -> None:
        """Waits until everything published so far has left (G21).

        Raises:
            BusDown: the connection is or goes away.
        """
        ...

    async def close(self) -> None:
        """Ends the connection (G22). Closing twice does nothing."""
        ...


class Bus(Protocol):
    """A bus that connections can be made to. Inert until `connect`."""

    @property
    def address(self) -> str:
        """For people and logs: the URL without any secret, or "memory"."""
        ...

    async def connect(self, *, name: str, inbox: str) -> Connection:
        """Makes a connection; waits, and logs why, for as long as the server cannot be reached.

        Args:
            name: shown by the server's monitoring (a stage's instance name).
            inbox: subject prefix that nobody else uses, for replies to this connection's requests.

        Raises:
            BusPermissionDenied: the server refuses the credentials.
        """
        ...
