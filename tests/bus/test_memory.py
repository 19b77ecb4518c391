"""The memory bus keeps the guarantees; with faults played on it, those about faults too."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from busllm.bus.memory import MemoryBus
from busllm.bus.protocol import Message
from busllm.testing.bus_conformance import BusConformance
from busllm.testing.bus_fault_conformance import BusFaultConformance
from busllm.testing.bus_harness import receive_messages
from busllm.testing.memory_harness import FaultyMemoryHarness, MemoryHarness

pytestmark = pytest.mark.anyio


class TestMemoryBus(BusConformance):
    @pytest.fixture
    async def harness(self) -> AsyncIterator[MemoryHarness]:
        harness = MemoryHarness()
        yield harness
        await harness.close()


@pytest.fixture
async def harness() -> AsyncIterator[FaultyMemoryHarness]:
    harness = FaultyMemoryHarness()
    yield harness
    await harness.close()


class TestFaultyBus(BusConformance):
    pass


class TestFaultyBusUnderFaults(BusFaultConformance):
    pass


async def test_a_payload_that_the_publisher_changes_later_arrives_as_it_was() -> None:
    connection = await MemoryBus().connect(name="a", inbox="inbox.a")
    await connection.subscribe("a")
    payload = bytearray(b"before")
    connection.publish("a", payload)  # type: ignore[arg-type]  # what a careless caller does
    payload[:] = b"after!"
    [message] = await receive_messages(connection, 1)
    assert message.payload == b"before"


async def test_two_memory_buses_do_not_hear_each_other() -> None:
    here = await MemoryBus().connect(name="a", inbox="inbox.a")
    there = await MemoryBus().connect(name="a", inbox="inbox.a")
    await here.subscribe(">")
    there.publish("a", b"")
    here.publish("b", b"")
    [item] = await here.receive()
    assert isinstance(item, Message) and item.subject == "b"


async def test_a_closed_connection_leaves_nothing_behind() -> None:
    bus = MemoryBus()
    connection = await bus.connect(name="a", inbox="inbox.a")
    await connection.subscribe("a.*.>")
    await connection.close()
    other = await bus.connect(name="b", inbox="inbox.b")
    await other.subscribe("reply")
    other.publish("a.b.c", b"", reply="reply")
    assert (await receive_messages(other, 1))[0].no_responders
