"""What the bus conformance suite needs of the bus under test.

Owns: `BusHarness`, `Connections` to build one on, and reading messages in tests without ever waiting for ever.
Does not know: any bus.
Next on the path: `bus_conformance.py` and `bus_fault_conformance.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import anyio

from busllm.bus.protocol import Bus, BusEvent, Connection, Message
from busllm.bus.queue import QueueBounds

REFUSED_PREFIX = "refused"
PATIENCE_S = 20.0  # the longest that any test waits: far more than a healthy bus takes on a busy machine


class Connecting(Protocol):
    """What tests need of a bus without faults."""

    async def connect(self, *, bounds: QueueBounds | None = None) -> Connection:
        """Makes a connection with an inbox of its own."""
        ...


class BusHarness(Connecting, Protocol):
    """A bus and its server, for one test. Its fixture closes all connections afterwards."""

    @property
    def refused_prefix(self) -> str:
        """Subjects under this token may be neither published nor subscribed to."""
        ...

    async def cut(self) -> None:
        """The server goes away; every connection loses it."""
        ...

    async def mend(self) -> None:
        """The server is back; connections may take a moment to notice."""
        ...

    async def freeze(self) -> None:
        """The server stops reading, its connections stay open."""
        ...

    async def thaw(self) -> None:
        """The server reads again."""
        ...


class Connections(ABC):
    """The connections of one test; the part of a harness that every bus can use."""

    def __init__(self) -> None:
        self._connections: list[Connection] = []

    @abstractmethod
    def bus(self, bounds: QueueBounds) -> Bus:
        """The bus under test, whose next connection has these bounds."""

    async def connect(self, *, bounds: QueueBounds | None = None) -> Connection:
        """Makes a connection with an inbox of its own."""
        number = len(self._connections)
        bus = self.bus(bounds or QueueBounds())
        self._connections.append(await bus.connect(name=f"test-{number}", inbox=f"inbox.test-{number}"))
        return self._connections[-1]

    async def close(self) -> None:
        """Closes them all."""
        for connection in self._connections:
            await connection.close()


async def receive_messages(connection: Connection, num_messages: int) -> list[Message]:
    """The next messages; fails when an event or more messages than that come with them."""
    items: list[Message | BusEvent] = []
    with anyio.fail_after(PATIENCE_S):
        while len(items) < num_messages:
            items += await connection.receive()
    messages = [item for item in items if isinstance(item, Message)]
    assert len(items) == len(messages) == num_messages, f"expected {num_messages} messages, got {items}"
    return messages


async def receive_until(connection: Connection, kind: type[Message | BusEvent]) -> list[Message | BusEvent]:
    """Everything up to the first list that has an item of that kind."""
    items: list[Message | BusEvent] = []
    with anyio.fail_after(PATIENCE_S):
        while not any(isinstance(item, kind) for item in items):
            items += await connection.receive()
    return items


async def deliver_all(publisher: Connection, receiver: Connection) -> None:
    """Waits until what was published is in the receiver's queue: the server has it, and answered behind it."""
    with anyio.fail_after(PATIENCE_S):
        await publisher.flush()
        await receiver.flush()
