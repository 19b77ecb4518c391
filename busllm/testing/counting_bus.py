"""A memory bus that counts what goes over it, so that a test can hold how much a token costs.

Owns: the messages that were published, by subject, and how often each connection woke its reader.
Does not know: which counts are right.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from busllm.bus.memory import MemoryBus, MemoryConnection
from busllm.bus.protocol import BusEvent, Message
from busllm.bus.queue import QueueBounds


class Sent(msgspec.Struct, frozen=True):
    """One published message."""

    subject: str
    num_bytes: int


class CountingBus(MemoryBus):
    """A `MemoryBus` that remembers; implements `Bus`.

    Attributes:
        sent: every message that was published, in order.
        wake_ups: how often `receive` returned, by the name of the connection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        self.wake_ups: Counter[str] = Counter()

    async def connect(self, *, name: str, inbox: str) -> CountingConnection:
        """Makes a connection at once."""
        return CountingConnection(self, name, inbox, self.bounds)

    def sent_on(self, kind: str) -> list[Sent]:
        """What was published on `busllm.<cluster>.<kind>.…`."""
        return [one for one in self.sent if one.subject.split(".")[2] == kind]


class CountingConnection(MemoryConnection):
    """A connection to a `CountingBus`; implements `Connection`."""

    def __init__(self, bus: CountingBus, name: str, inbox: str, bounds: QueueBounds) -> None:
        super().__init__(bus, inbox, bounds)
        self._counting_bus = bus
        self._name = name

    def send(self, subject: str, payload: bytes, reply: str | None) -> None:
        """Counts a checked message and routes it."""
        self._counting_bus.sent.append(Sent(subject, len(payload)))
        super().send(subject, payload, reply)

    async def receive(self) -> list[Message | BusEvent]:
        """Waits for at least one item and returns all that are ready."""
        items = await super().receive()
        self._counting_bus.wake_ups[self._name] += 1
        return items
