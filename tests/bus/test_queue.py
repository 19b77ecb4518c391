"""The incoming queue of a connection."""

from __future__ import annotations

import anyio
import pytest

from busllm.bus.protocol import Disconnected, Message, Overflow, Reconnected
from busllm.bus.queue import IncomingQueue, QueueBounds

pytestmark = pytest.mark.anyio


def message(number: int, payload: bytes = b"") -> Message:
    return Message("a", payload, None, number)


async def test_events_keep_their_place_among_messages() -> None:
    queue = IncomingQueue(QueueBounds())
    queue.put(message(1))
    queue.tell(Disconnected("gone"))
    queue.tell(Reconnected(1.0))
    queue.put(message(2))
    assert await queue.receive() == [message(1), Disconnected("gone"), Reconnected(1.0), message(2)]


async def test_events_are_kept_when_the_queue_is_full() -> None:
    queue = IncomingQueue(QueueBounds(max_incoming_messages=1))
    queue.put(message(1))
    queue.put(message(2))
    queue.tell(Disconnected("gone"))
    assert await queue.receive() == [message(1), Disconnected("gone"), Overflow(1)]
    queue.put(message(3))
    assert await queue.receive() == [message(3)]


async def test_an_event_that_repeats_the_newest_item_is_told_once() -> None:
    queue = IncomingQueue(QueueBounds())
    for _ in range(3):
        queue.tell(Disconnected("gone"))
    assert await queue.receive() == [Disconnected("gone")]


async def test_discarded_messages_make_room() -> None:
    queue = IncomingQueue(QueueBounds(max_incoming_messages=2, max_incoming_bytes=10))
    queue.put(message(1, b"12345"))
    queue.put(message(2, b"12345"))
    queue.discard([1])
    queue.put(message(3, b"12345"))
    assert [item.subscription for item in await queue.receive() if isinstance(item, Message)] == [2, 3]


async def test_a_second_reader_is_refused() -> None:
    queue = IncomingQueue(QueueBounds())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(queue.receive)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(anyio.BusyResourceError):
            await queue.receive()
        queue.put(message(1))


async def test_a_cancelled_reader_loses_nothing() -> None:
    queue = IncomingQueue(QueueBounds())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(queue.receive)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    queue.put(message(1))
    with anyio.CancelScope() as cancelled:
        cancelled.cancel()
        await queue.receive()
    assert await queue.receive() == [message(1)]


async def test_a_reader_of_a_full_queue_lets_others_run() -> None:
    queue = IncomingQueue(QueueBounds())
    turns: list[str] = []

    async def other() -> None:
        turns.append("other")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        queue.put(message(1))
        await queue.receive()
        turns.append("reader")
    assert turns == ["other", "reader"]
