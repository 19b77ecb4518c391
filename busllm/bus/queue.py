"""The bounded queue between a connection and the actor that reads it.

Owns: order, bounds, counting what was dropped, waking the one reader. Every bus uses it, so that all of them mean the
same by "full".
Does not know: where messages come from.
Next on the path: the actor's mailbox, which calls `Connection.receive`.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.lowlevel
import msgspec

from busllm.bus.protocol import BusEvent, ConnectionClosed, Message, Overflow


class QueueBounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much may wait on one connection.

    Attributes:
        max_incoming_messages: messages that `receive` has not fetched.
        max_incoming_bytes: their payloads together.
        max_outgoing_bytes: published and not yet with the server; more raises `BusCongested`.
    """

    max_incoming_messages: int = 65_536
    max_incoming_bytes: int = 64 * 2**20
    max_outgoing_bytes: int = 4 * 2**20


class IncomingQueue:
    """Messages and events of one connection, in order of arrival.

    Once it is full everything new is dropped until the reader has fetched what is there: a smaller message that would
    still fit must not hide the gap before it. Events are always kept: a bus reports few of them, at its own pace.

    Args:
        bounds: how much may wait. A message that is larger than `max_incoming_bytes` by itself passes when it is alone.
    """

    def __init__(self, bounds: QueueBounds) -> None:
        self._bounds = bounds
        self._items: list[Message | BusEvent] = []
        self._num_messages = 0
        self._num_bytes = 0
        self._num_dropped = 0
        self._wakeup: anyio.Event | None = None
        self._is_closed = False

    def put(self, message: Message) -> None:
        """Takes a message in, or drops and counts it."""
        num_bytes = self._num_bytes + len(message.payload)
        is_full = self._num_messages >= self._bounds.max_incoming_messages or (
            num_bytes > self._bounds.max_incoming_bytes and self._num_messages > 0
        )
        if is_full or self._num_dropped > 0:
            self._num_dropped += 1
            return
        self._items.append(message)
        self._num_messages += 1
        self._num_bytes = num_bytes
        if self._wakeup is not None:
            self._wake()

    def tell(self, event: BusEvent) -> None:
        """Takes an event in; one that only repeats the newest item is left out."""
        if self._items and self._items[-1] == event:
            return
        self._items.append(event)
        self._wake()

    def discard(self, subscriptions: Sequence[int]) -> None:
        """Removes the waiting messages of some subscriptions."""
        kept = [item for item in self._items if not isinstance(item, Message) or item.subscription not in subscriptions]
        payload_bytes = [len(item.payload) for item in kept if isinstance(item, Message)]
        self._items, self._num_messages, self._num_bytes = kept, len(payload_bytes), sum(payload_bytes)

    def close(self) -> None:
        """Drops what waits and ends the reader with `ConnectionClosed`."""
        self._is_closed = True
        self._items = []
        self._wake()

    async def receive(self) -> list[Message | BusEvent]:
        """Waits for at least one item and returns all; always gives other tasks a turn.

        Raises:
            ConnectionClosed: the queue was closed.
            anyio.BusyResourceError: another task is waiting already.
        """
        if self._wakeup is not None:
            raise anyio.BusyResourceError("receiving from")
        if self._items or self._is_closed:
            await anyio.lowlevel.checkpoint()
        while not self._items and not self._is_closed:
            self._wakeup = anyio.Event()
            try:
                await self._wakeup.wait()
            finally:
                self._wakeup = None
        if self._is_closed:
            raise ConnectionClosed("the connection was closed; nothing more can be received.")
        return self._drain()

    def _drain(self) -> list[Message | BusEvent]:
        items, self._items = self._items, []
        if self._num_dropped:
            items.append(Overflow(self._num_dropped))
        self._num_messages = self._num_bytes = self._num_dropped = 0
        return items

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()
