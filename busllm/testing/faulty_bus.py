"""A memory bus that can be lost, frozen and forbidden.

Owns: the faults of a bus server, played on a `MemoryBus`: an outage, a server that stops reading, refused subjects.
Does not know: what is tested with them.

    bus = FaultyBus()
    connection = await bus.connect(name="a", inbox="inbox.a")
    bus.cut("pulled the plug")   # Disconnected in every connection; publishing raises BusDown
    bus.mend()                   # Reconnected; what was published meanwhile is gone
    bus.give_up()                # every connection ends for good
"""

from __future__ import annotations

from busllm.bus.matching import SubjectTree
from busllm.bus.memory import DEFAULT_MAX_PAYLOAD_BYTES, MemoryBus, MemoryConnection
from busllm.bus.protocol import Disconnected, Message, PermissionRefused, Reconnected, Subscription
from busllm.bus.queue import QueueBounds
from busllm.errors import BusCongested, BusPermissionDenied


class FaultyBus(MemoryBus):
    """A `MemoryBus` with faults; implements `Bus`.

    Args:
        max_payload_bytes: the largest payload that may be published.
        bounds: how much may wait on each connection.
        refused: pattern of subjects that may be neither published nor subscribed to.
    """

    def __init__(
        self,
        *,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
        bounds: QueueBounds | None = None,
        refused: str | None = None,
    ) -> None:
        super().__init__(max_payload_bytes=max_payload_bytes, bounds=bounds)
        self._refused: SubjectTree[str] = SubjectTree()
        if refused is not None:
            self._refused.add(refused, refused)
        self._connections: list[FaultyConnection] = []
        self.is_frozen = False

    async def connect(self, *, name: str, inbox: str) -> FaultyConnection:
        """Makes a connection at once."""
        connection = FaultyConnection(self, inbox, self.bounds)
        self._connections.append(connection)
        return connection

    def is_refused(self, subject: str) -> bool:
        """Whether a subject (or pattern) falls under the refused pattern."""
        return bool(self._refused.match(subject))

    def cut(self, reason: str = "the server went away") -> None:
        """Every connection is lost."""
        self.is_frozen = False
        for connection in self._connections:
            connection.lose(reason)

    def mend(self, outage_s: float = 0.0) -> None:
        """Every lost connection is back; `outage_s` is what it is told."""
        for connection in self._connections:
            connection.come_back(outage_s)

    def give_up(self) -> None:
        """Every connection ends for good: nobody reconnects it. New ones can be made."""
        for connection in self._connections:
            connection.give_up()

    def freeze(self) -> None:
        """The server stops reading: what is published waits, up to the outgoing bound."""
        self.is_frozen = True

    def thaw(self) -> None:
        """The server reads again, and delivers what has waited."""
        self.is_frozen = False
        for connection in self._connections:
            connection.send_waiting()


class FaultyConnection(MemoryConnection):
    """A connection to a `FaultyBus`; implements `Connection`.

    Args:
        bus: the bus that made it.
        inbox: subject prefix for replies.
        bounds: how much may wait.
    """

    def __init__(self, bus: FaultyBus, inbox: str, bounds: QueueBounds) -> None:
        super().__init__(bus, inbox, bounds)
        self._faulty_bus = bus
        self._max_outgoing_bytes = bounds.max_outgoing_bytes
        self._waiting: list[tuple[str, bytes, str | None]] = []
        self._num_waiting_bytes = 0

    def send(self, subject: str, payload: bytes, reply: str | None) -> None:
        """Routes a checked message, unless a fault is in its way."""
        if self._faulty_bus.is_refused(subject):
            self._queue.tell(PermissionRefused(f"publishing to {subject!r} is refused"))
        elif not self._faulty_bus.is_frozen:
            super().send(subject, payload, reply)
        elif self._num_waiting_bytes >= self._max_outgoing_bytes:
            raise BusCongested(self._num_waiting_bytes, self._max_outgoing_bytes)
        else:
            self._waiting.append((subject, payload, reply))
            self._num_waiting_bytes += len(payload)

    async def subscribe(self, pattern: str, *, queue_group: str | None = None) -> Subscription:
        """Subscribes, unless the pattern is refused."""
        if self._faulty_bus.is_refused(pattern):
            raise BusPermissionDenied(f"subscribing to {pattern!r} is refused.")
        return await super().subscribe(pattern, queue_group=queue_group)

    def deliver(self, message: Message) -> None:
        """Takes in one message; a lost connection hears nothing."""
        if self.is_connected:
            super().deliver(message)

    def lose(self, reason: str) -> None:
        """The connection is lost, with what waited to be sent."""
        if self._is_closed or not self.is_connected:
            return
        self._down_reason = reason
        self._waiting, self._num_waiting_bytes = [], 0
        self._inbox.fail_all(reason)
        self._queue.tell(Disconnected(reason))

    def come_back(self, outage_s: float) -> None:
        """The connection is back."""
        if self._is_closed or self.is_connected:
            return
        self._down_reason = None
        self._queue.tell(Reconnected(outage_s))

    def give_up(self) -> None:
        """The connection is lost and stays so; who receives hears `ConnectionClosed`."""
        self.lose("nobody keeps the connection")
        self._queue.close()

    def send_waiting(self) -> None:
        """Sends what waited while the server did not read."""
        waiting, self._waiting, self._num_waiting_bytes = self._waiting, [], 0
        for subject, payload, reply in waiting:
            super().send(subject, payload, reply)
