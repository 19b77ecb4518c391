"""The guarantees of `busllm/bus/protocol.py`, a test per sentence: those about loss, congestion and refusals.

Owns: `BusFaultConformance`.
Does not know: any bus; the harness plays the faults on its server.
See `bus_conformance.py` for how a plug-in uses both.
"""

from __future__ import annotations

import time

import anyio
import pytest

from busllm.bus.protocol import Connection, Disconnected, Message, Overflow, PermissionRefused, Reconnected
from busllm.bus.queue import QueueBounds
from busllm.errors import BusCongested, BusDown, BusPermissionDenied
from busllm.testing.bus_harness import PATIENCE_S, BusHarness, deliver_all, receive_messages, receive_until

_CHUNK = b"x" * 65_536
_ENOUGH_CHUNKS = 2000  # 125 MiB: more than the kernel buffers of any machine take


class BusFaultConformance:
    """Subclass it in a test module with a fixture `harness`."""

    async def test_g09_publish_does_not_wait_for_a_server_that_stopped_reading(self, harness: BusHarness) -> None:
        publisher = await harness.connect(bounds=QueueBounds(max_outgoing_bytes=2**20))
        await harness.freeze()
        began_at = time.monotonic()
        _publish_until_congested(publisher, "g9")
        waited_s = time.monotonic() - began_at
        await harness.thaw()
        assert waited_s < 1.0

    async def test_g11_while_disconnected_publish_raises_and_what_was_refused_is_never_sent(
        self, harness: BusHarness
    ) -> None:
        publisher, receiver = await harness.connect(), await harness.connect()
        await receiver.subscribe("g11.>")
        await harness.cut()
        await receive_until(publisher, Disconnected)
        assert not publisher.is_connected
        with pytest.raises(BusDown):
            publisher.publish("g11.refused", b"")
        with pytest.raises(BusDown):
            await publisher.flush()
        with pytest.raises(BusDown):
            await publisher.subscribe("g11.other")
        await harness.mend()
        await receive_until(publisher, Reconnected)
        await receive_until(receiver, Reconnected)
        publisher.publish("g11.end", b"")
        assert [message.subject for message in await receive_messages(receiver, 1)] == ["g11.end"]

    async def test_g12_beyond_the_outgoing_bound_publish_raises_with_both_numbers(self, harness: BusHarness) -> None:
        bound = 2**18
        publisher, receiver = (
            await harness.connect(bounds=QueueBounds(max_outgoing_bytes=bound)),
            await harness.connect(),
        )
        await receiver.subscribe("g12")
        await harness.freeze()
        num_taken, congested = _publish_until_congested(publisher, "g12")
        assert congested.max_pending_bytes == bound
        assert bound <= congested.pending_bytes < bound + 2 * len(_CHUNK)
        await harness.thaw()
        await receive_messages(receiver, num_taken)
        publisher.publish("g12", b"usable again")
        assert (await receive_messages(receiver, 1))[0].payload == b"usable again"

    async def test_g14_when_the_queue_is_full_of_messages_new_ones_are_dropped_and_counted(
        self, harness: BusHarness
    ) -> None:
        publisher, receiver = (
            await harness.connect(),
            await harness.connect(bounds=QueueBounds(max_incoming_messages=10)),
        )
        await receiver.subscribe("g14")
        for number in range(25):
            publisher.publish("g14", str(number).encode())
        await deliver_all(publisher, receiver)
        *kept, overflow = await receiver.receive()
        assert [item.payload for item in kept if isinstance(item, Message)] == [b"%d" % number for number in range(10)]
        assert overflow == Overflow(15)
        publisher.publish("g14", b"usable")
        assert (await receive_messages(receiver, 1))[0].payload == b"usable"

    async def test_g14_when_the_queue_is_full_of_bytes_new_messages_are_dropped_and_counted(
        self, harness: BusHarness
    ) -> None:
        publisher, receiver = (
            await harness.connect(),
            await harness.connect(bounds=QueueBounds(max_incoming_bytes=1000)),
        )
        await receiver.subscribe("g14")
        for payload in (b"a" * 600, b"b" * 600, b"small enough, but behind a gap"):
            publisher.publish("g14", payload)
        await deliver_all(publisher, receiver)
        kept, overflow = await receiver.receive()
        assert isinstance(kept, Message) and kept.payload == b"a" * 600
        assert overflow == Overflow(2)
        publisher.publish("g14", b"larger than the bound, but alone" * 50)
        assert len((await receive_messages(receiver, 1))[0].payload) == 1600

    async def test_g15_loss_and_return_are_told_and_subscriptions_are_in_force_again(self, harness: BusHarness) -> None:
        publisher, receiver = await harness.connect(), await harness.connect()
        await receiver.subscribe("g15.>")
        ended = await receiver.subscribe("g15end")
        for outage in range(2):
            await harness.cut()
            assert [type(item) for item in await receive_until(receiver, Disconnected)] == [Disconnected]
            await receive_until(publisher, Disconnected)
            if outage == 1:
                await receiver.unsubscribe(ended)
            await harness.mend()
            [back] = await receive_until(receiver, Reconnected)
            assert isinstance(back, Reconnected) and back.outage_s >= 0
            await receive_until(publisher, Reconnected)
            publisher.publish("g15.again", b"")
            publisher.publish("g15end", b"")
            subjects = [message.subject for message in await receive_messages(receiver, 2 - outage)]
            assert subjects == ["g15.again", "g15end"][: 2 - outage]

    async def test_g15_a_request_under_way_ends_when_the_connection_is_lost(self, harness: BusHarness) -> None:
        client, silent = await harness.connect(), await harness.connect()
        await silent.subscribe("g15.silent")

        async def expect_down() -> None:
            with pytest.raises(BusDown):
                await client.request("g15.silent", b"", timeout_s=3600)

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(expect_down)
                await receive_messages(silent, 1)
                await harness.cut()
        await harness.mend()

    async def test_g16_when_subscribe_returns_the_subscription_is_in_force(self, harness: BusHarness) -> None:
        publisher, receiver = await harness.connect(), await harness.connect()
        for number in range(50):
            await receiver.subscribe(f"g16.{number}")
            publisher.publish(f"g16.{number}", b"")
        await receive_messages(receiver, 50)

    async def test_g16_a_refused_subscription_raises_and_the_connection_stays_usable(self, harness: BusHarness) -> None:
        connection = await harness.connect()
        with pytest.raises(BusPermissionDenied):
            await connection.subscribe(f"{harness.refused_prefix}.Work.>")
        with pytest.raises(BusPermissionDenied):
            await connection.subscribe(f"{harness.refused_prefix}.work", queue_group="workers")
        await connection.subscribe("g16.permitted")
        connection.publish("g16.permitted", b"")
        assert [message.subject for message in await receive_messages(connection, 1)] == ["g16.permitted"]

    async def test_g16_a_refused_publish_is_told(self, harness: BusHarness) -> None:
        connection = await harness.connect()
        connection.publish(f"{harness.refused_prefix}.work", b"")
        [refused] = await receive_until(connection, PermissionRefused)
        assert isinstance(refused, PermissionRefused) and harness.refused_prefix in refused.reason
        assert connection.is_connected

    async def test_g22_close_does_not_wait_for_a_server_that_stopped_reading(self, harness: BusHarness) -> None:
        connection = await harness.connect()
        await harness.freeze()
        connection.publish("g22", b"")
        with anyio.fail_after(5):
            await connection.close()
        await harness.thaw()


def _publish_until_congested(publisher: Connection, subject: str) -> tuple[int, BusCongested]:
    for num_taken in range(_ENOUGH_CHUNKS):
        try:
            publisher.publish(subject, _CHUNK)
        except BusCongested as congested:
            return num_taken, congested
    raise AssertionError(f"{_ENOUGH_CHUNKS} chunks were taken although nobody reads them")
