"""The guarantees of `busllm/bus/protocol.py`, a test per sentence: those that a healthy server can show.

Owns: `BusConformance`. `bus_fault_conformance.py` has the sentences about loss, congestion and refusals; a bus passes
both.
Does not know: any bus.

A plug-in's test module has a fixture `harness` that yields a `BusHarness`, and two classes:

    pytestmark = pytest.mark.anyio

    class TestGuarantees(BusConformance): ...
    class TestGuaranteesUnderFaults(BusFaultConformance): ...

Its conftest.py says `pytest.register_assert_rewrite("busllm.testing")`, so that a failure shows the values.
"""

from __future__ import annotations

import anyio
import pytest

from busllm.bus.protocol import Connection, ConnectionClosed, Message
from busllm.errors import BadSubject, BusDown, NoResponders, PayloadTooLarge, ReplyTimeout
from busllm.testing.bus_harness import PATIENCE_S, Connecting, deliver_all, receive_messages

BAD_SUBJECTS = {
    "empty": "",
    "empty first token": ".a",
    "empty last token": "a.",
    "empty token": "a..b",
    "space": "a b",
    "tab": "a\tb",
    "line break": "a\r\nPUB evil 1\r\n!",
    "control character": "a.\x00b",
    "token wildcard": "a.*",
    "rest wildcard": "a.>",
    "wildcard inside a token": "a.b*",
    "lone surrogate": "a.\ud83d",
    "too long": "a" * 5000,
    "too long in UTF-8": "é" * 600,
}


class BusConformance:
    """Subclass it in a test module with a fixture `harness`."""

    async def test_g01_a_message_reaches_everybody_who_subscribed_before_and_nobody_who_did_later(
        self, harness: Connecting
    ) -> None:
        publisher, first, second = await harness.connect(), await harness.connect(), await harness.connect()
        await first.subscribe("g1.*")
        publisher.publish("g1.early", b"")
        await publisher.flush()
        await second.subscribe("g1.>")
        publisher.publish("g1.late", b"")
        assert [message.subject for message in await receive_messages(first, 2)] == ["g1.early", "g1.late"]
        assert [message.subject for message in await receive_messages(second, 1)] == ["g1.late"]

    async def test_g02_messages_of_one_connection_on_one_subject_arrive_in_order(self, harness: Connecting) -> None:
        publisher, receiver = await harness.connect(), await harness.connect()
        await receiver.subscribe("g2")
        sent = [str(number).encode() for number in range(2000)]
        for payload in sent:
            publisher.publish("g2", payload)
        assert [message.payload for message in await receive_messages(receiver, len(sent))] == sent

    async def test_g03_messages_on_several_subjects_of_one_subscription_arrive_in_order(
        self, harness: Connecting
    ) -> None:
        publisher, receiver = await harness.connect(), await harness.connect()
        await receiver.subscribe("g3.*")
        sent = [f"g3.{number % 7}" for number in range(700)]
        for subject in sent:
            publisher.publish(subject, b"")
        assert [message.subject for message in await receive_messages(receiver, len(sent))] == sent

    async def test_g04_no_message_is_delivered_twice_or_kept_for_later(self, harness: Connecting) -> None:
        publisher, receiver, late = await harness.connect(), await harness.connect(), await harness.connect()
        await receiver.subscribe("g4.>")
        publisher.publish("g4.once", b"")
        await publisher.flush()
        await late.subscribe("g4.>")
        publisher.publish("g4.end", b"")
        assert [message.subject for message in await receive_messages(receiver, 2)] == ["g4.once", "g4.end"]
        assert [message.subject for message in await receive_messages(late, 1)] == ["g4.end"]

    async def test_g05_each_message_reaches_exactly_one_subscription_of_a_queue_group(
        self, harness: Connecting
    ) -> None:
        publisher, watcher = await harness.connect(), await harness.connect()
        members = [await harness.connect() for _ in range(3)]
        await watcher.subscribe("g5.work")
        for member in members:
            await member.subscribe("g5.*", queue_group="workers")
            await member.subscribe("g5end")
        sent = [str(number).encode() for number in range(300)]
        for payload in sent:
            publisher.publish("g5.work", payload)
        await receive_messages(watcher, len(sent))
        publisher.publish("g5end", b"")
        shares: list[list[bytes]] = []
        for member in members:
            await deliver_all(publisher, member)
            items = [item for item in await member.receive() if isinstance(item, Message)]
            shares.append([item.payload for item in items if item.subject == "g5.work"])
        assert sorted(int(payload) for share in shares for payload in share) == list(range(300))
        assert all(shares), "every member gets a share"

    @pytest.mark.parametrize("payload", [b"", b"\x00", b"\r\n", b"MSG a 1 1\r\n", bytes(range(256)) * 1000])
    async def test_g06_a_payload_arrives_as_the_bytes_that_were_published(
        self, harness: Connecting, payload: bytes
    ) -> None:
        publisher, receiver = await harness.connect(), await harness.connect()
        subscription = await receiver.subscribe("g6")
        publisher.publish("g6", payload, reply="g6.answer")
        [message] = await receive_messages(receiver, 1)
        assert message == Message("g6", payload, "g6.answer", subscription.number)
        assert type(message.payload) is bytes

    async def test_g07_a_star_matches_one_token_and_a_final_angle_the_rest(self, harness: Connecting) -> None:
        publisher, receiver = await harness.connect(), await harness.connect()
        expected = {
            "g7.a.b": {"g7.a.b"},
            "g7.*.b": {"g7.a.b", "g7.c.b"},
            "g7.*": {"g7.a"},
            "g7.>": {"g7.a", "g7.a.b", "g7.c.b", "g7.a.b.c"},
            "g7.a.>": {"g7.a.b", "g7.a.b.c"},
            "*.a.*.>": {"g7.a.b.c"},
        }
        patterns = {(await receiver.subscribe(pattern)).number: pattern for pattern in expected}
        for subject in ("g7", "g7.a", "g7.a.b", "g7.c.b", "g7.a.b.c"):
            publisher.publish(subject, b"")
        seen: dict[str, set[str]] = {pattern: set() for pattern in expected}
        for message in await receive_messages(receiver, sum(map(len, expected.values()))):
            seen[patterns[message.subscription]].add(message.subject)
        assert seen == expected

    @pytest.mark.parametrize("subject", BAD_SUBJECTS.values(), ids=BAD_SUBJECTS.keys())
    async def test_g08_a_bad_subject_is_refused_and_nothing_is_sent(self, harness: Connecting, subject: str) -> None:
        publisher, receiver = await harness.connect(), await harness.connect()
        await receiver.subscribe(">")
        with pytest.raises(BadSubject):
            publisher.publish(subject, b"!")
        with pytest.raises(BadSubject):
            publisher.publish("g8.good", b"!", reply=subject)
        publisher.publish("g8.end", b"")
        assert [message.subject for message in await receive_messages(receiver, 1)] == ["g8.end"]

    @pytest.mark.parametrize("pattern", ["", "a..b", "a.>.b", "a b", "a*", "a.b>", ".>", "a\r\nSUB x 9"])
    async def test_g08_a_bad_pattern_is_refused(self, harness: Connecting, pattern: str) -> None:
        connection = await harness.connect()
        with pytest.raises(BadSubject):
            await connection.subscribe(pattern)
        with pytest.raises(BadSubject):
            await connection.subscribe("g8", queue_group="a b")

    async def test_g10_a_payload_over_the_limit_is_refused_with_both_numbers_and_the_connection_stays_usable(
        self, harness: Connecting
    ) -> None:
        publisher, receiver = await harness.connect(), await harness.connect()
        await receiver.subscribe("g10")
        limit = publisher.max_payload_bytes
        with pytest.raises(PayloadTooLarge) as refused:
            publisher.publish("g10", b"x" * (limit + 1))
        assert (refused.value.payload_bytes, refused.value.max_payload_bytes) == (limit + 1, limit)
        publisher.publish("g10", b"x" * limit)
        [message] = await receive_messages(receiver, 1)
        assert len(message.payload) == limit

    async def test_g13_receive_returns_everything_that_is_ready_in_order_of_arrival(self, harness: Connecting) -> None:
        publisher, receiver = await harness.connect(), await harness.connect()
        for pattern in ("g13.a", "g13.b", "g13.c"):
            await receiver.subscribe(pattern)
        sent = [f"g13.{letter}" for letter in "abcabccba" * 10]
        for subject in sent:
            publisher.publish(subject, b"")
        await deliver_all(publisher, receiver)
        items = await receiver.receive()
        assert [item.subject for item in items if isinstance(item, Message)] == sent

    async def test_g17_after_unsubscribe_no_message_of_that_subscription_is_received(self, harness: Connecting) -> None:
        publisher, receiver = await harness.connect(), await harness.connect()
        ended = await receiver.subscribe("g17.ended")
        await receiver.subscribe("g17.kept")
        publisher.publish("g17.ended", b"waiting in the queue")
        await deliver_all(publisher, receiver)
        publisher.publish("g17.ended", b"on its way")
        await receiver.unsubscribe(ended)
        publisher.publish("g17.ended", b"late")
        publisher.publish("g17.kept", b"")
        assert [message.subject for message in await receive_messages(receiver, 1)] == ["g17.kept"]
        await receiver.flush()
        with pytest.raises(NoResponders):
            await publisher.request("g17.ended", b"", timeout_s=PATIENCE_S)

    async def test_g18_a_request_returns_the_first_reply(self, harness: Connecting) -> None:
        client, server = await harness.connect(), await harness.connect()
        await server.subscribe("g18")

        async def answer_twice() -> None:
            for message in await receive_messages(server, 1):
                assert message.reply is not None
                server.publish(message.reply, b"first to " + message.payload)
                server.publish(message.reply, b"second")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer_twice)
            assert await client.request("g18", b"hello", timeout_s=PATIENCE_S) == b"first to hello"

    async def test_g18_a_request_that_nobody_listens_to_fails_at_once(self, harness: Connecting) -> None:
        client = await harness.connect()
        with anyio.fail_after(PATIENCE_S), pytest.raises(NoResponders):
            await client.request("g18.nobody", b"", timeout_s=3600)

    async def test_g18_a_request_to_a_silent_listener_times_out(self, harness: Connecting) -> None:
        client, silent = await harness.connect(), await harness.connect()
        await silent.subscribe("g18.silent")
        with anyio.fail_after(PATIENCE_S), pytest.raises(ReplyTimeout):
            await client.request("g18.silent", b"", timeout_s=0.05)

    async def test_g19_a_publish_to_nobody_comes_back_to_a_publisher_that_listens_to_its_reply_subject(
        self, harness: Connecting
    ) -> None:
        publisher, other = await harness.connect(), await harness.connect()
        await other.subscribe("g19.reply.*")
        publisher.publish("g19.nobody", b"work", reply="g19.reply.0")
        await publisher.subscribe("g19.unused")
        subscription = await publisher.subscribe("g19.reply.*")
        publisher.publish("g19.nobody", b"work", reply="g19.reply.1")
        expected = Message("g19.reply.1", b"", None, subscription.number, no_responders=True)
        assert await receive_messages(publisher, 1) == [expected]
        publisher.publish("g19.reply.end", b"")
        assert [message.subject for message in await receive_messages(other, 1)] == ["g19.reply.end"]

    async def test_g20_replies_arrive_at_the_connections_own_inbox(self, harness: Connecting) -> None:
        clients, server = [await harness.connect(), await harness.connect()], await harness.connect()
        await server.subscribe("g20")
        assert clients[0].inbox != clients[1].inbox
        for client in clients:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_answer_one, server, f"{client.inbox}.")
                await client.request("g20", b"", timeout_s=PATIENCE_S)

    async def test_g21_after_flush_everything_published_is_with_the_server(self, harness: Connecting) -> None:
        publisher, receiver = await harness.connect(), await harness.connect()
        await receiver.subscribe("g21")
        for number in range(1000):
            publisher.publish("g21", bytes(number))
        await deliver_all(publisher, receiver)
        assert len(await receiver.receive()) == 1000

    async def test_g22_close_flushes_what_was_published(self, harness: Connecting) -> None:
        publisher, receiver = await harness.connect(), await harness.connect()
        await receiver.subscribe("g22")
        for _ in range(1000):
            publisher.publish("g22", b"x" * 100)
        await publisher.close()
        await publisher.close()
        assert not publisher.is_connected
        with pytest.raises(BusDown):
            publisher.publish("g22", b"")
        await receive_messages(receiver, 1000)

    async def test_g22_close_ends_a_waiting_and_a_later_receive_and_a_request(self, harness: Connecting) -> None:
        connection, silent = await harness.connect(), await harness.connect()
        await silent.subscribe("g22.silent")

        async def expect_closed() -> None:
            with pytest.raises(ConnectionClosed):
                await connection.receive()

        async def expect_down() -> None:
            with pytest.raises(BusDown):
                await connection.request("g22.silent", b"", timeout_s=3600)

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(expect_closed)
                tasks.start_soon(expect_down)
                await receive_messages(silent, 1)  # both wait by now
                await connection.close()
            await expect_closed()


async def _answer_one(server: Connection, reply_prefix: str) -> None:
    [message] = await receive_messages(server, 1)
    assert message.reply is not None and message.reply.startswith(reply_prefix)
    server.publish(message.reply, b"")
