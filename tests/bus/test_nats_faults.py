"""What can go wrong with a NATS server while a connection stands, beyond the conformance suite."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest
from structlog.testing import capture_logs

from busllm.bus.nats import NatsBus
from busllm.bus.nats_options import NatsOptions
from busllm.bus.nats_server import EmbeddedNatsServer, NatsServerOptions
from busllm.bus.protocol import Disconnected, Message, Reconnected
from busllm.errors import PayloadTooLarge
from busllm.testing.bus_harness import PATIENCE_S, deliver_all, receive_messages, receive_until
from busllm.testing.nats_harness import QUICK_RETRY, NatsHarness, RefusingNatsServer

pytestmark = pytest.mark.anyio


async def test_a_frozen_server_is_noticed_within_three_seconds_and_its_return_too(nats_harness: NatsHarness) -> None:
    connection = await nats_harness.connect()
    await nats_harness.freeze()
    frozen_at = time.monotonic()
    [lost] = await receive_until(connection, Disconnected)
    assert isinstance(lost, Disconnected) and "2 pings" in lost.reason
    assert 1.9 < time.monotonic() - frozen_at < 6.0  # three, and something for a busy machine
    await nats_harness.thaw()
    await receive_until(connection, Reconnected)


async def test_an_outage_of_a_fifth_of_a_second_is_told_with_its_length(nats_harness: NatsHarness) -> None:
    connection = await nats_harness.connect()
    cut_at = time.monotonic()
    await nats_harness.cut()
    await receive_until(connection, Disconnected)
    with anyio.move_on_after(0.2):
        pytest.fail(f"nothing can come while the server is away, but {await connection.receive()}")
    await nats_harness.mend()
    [back] = await receive_until(connection, Reconnected)
    assert isinstance(back, Reconnected)
    assert 0.19 < back.outage_s <= time.monotonic() - cut_at


async def test_what_a_lost_server_had_not_taken_is_not_replayed_to_the_next_one(nats_harness: NatsHarness) -> None:
    publisher, receiver = await nats_harness.connect(), await nats_harness.connect()
    await receiver.subscribe("replay.>")
    await nats_harness.freeze()
    for _ in range(16):
        publisher.publish("replay.old", b"x" * 65_536)
    await nats_harness.cut()
    await receive_until(publisher, Disconnected)
    await receive_until(receiver, Disconnected)
    await nats_harness.mend()
    await receive_until(publisher, Reconnected)
    await receive_until(receiver, Reconnected)
    publisher.publish("replay.new", b"")
    assert [message.subject for message in await receive_messages(receiver, 1)] == ["replay.new"]


async def test_a_server_that_comes_back_with_another_password_is_tried_until_it_takes_ours(tmp_path: Path) -> None:
    server = RefusingNatsServer(NatsServerOptions(runtime_dir=tmp_path / "ours"))
    await server.start()
    bus = NatsBus(NatsOptions(urls=(server.url,), retry=QUICK_RETRY))
    connection = await bus.connect(name="a", inbox="inbox.a")
    await server.stop()
    with capture_logs() as logs:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=urlsplit(server.url).port or 0)
        num_refused = 0
        refused_twice = anyio.Event()

        async def refuse(stream: anyio.abc.SocketStream) -> None:
            nonlocal num_refused
            async with stream:
                await stream.send(b'INFO {"auth_required":true,"max_payload":4096}\r\n')
                await stream.receive()
                await stream.send(b"-ERR 'Authorization Violation'\r\n")
            num_refused += 1
            if num_refused >= 2:
                refused_twice.set()

        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, refuse)
            with anyio.fail_after(PATIENCE_S):
                await refused_twice.wait()
            tasks.cancel_scope.cancel()
        await server.start()
        items = await receive_until(connection, Reconnected)
    assert [type(item) for item in items] == [Disconnected, Reconnected]
    assert any("refuses the credentials" in entry.get("cause", "") for entry in logs)
    await connection.close()
    await server.stop()


async def test_the_servers_own_payload_limit_holds_and_the_connection_survives_it(tmp_path: Path) -> None:
    server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=tmp_path, max_payload_bytes=4096))
    await server.start()
    connection = await NatsBus(NatsOptions(urls=(server.url,))).connect(name="a", inbox="inbox.a")
    await connection.subscribe("a")
    assert connection.max_payload_bytes == 4096
    with pytest.raises(PayloadTooLarge) as refused:
        connection.publish("a", b"x" * 4097)
    assert refused.value.max_payload_bytes == 4096
    connection.publish("a", b"x" * 4096)
    assert len((await receive_messages(connection, 1))[0].payload) == 4096
    smaller = NatsBus(NatsOptions(urls=(server.url,), max_payload_bytes=100))
    other = await smaller.connect(name="b", inbox="inbox.b")
    assert other.max_payload_bytes == 100
    await connection.close()
    await other.close()
    await server.stop()


async def test_a_flush_that_was_given_up_does_not_disturb_later_ones(nats_harness: NatsHarness) -> None:
    connection = await nats_harness.connect()
    await connection.subscribe("given-up")
    await nats_harness.freeze()
    with anyio.move_on_after(0.01) as given_up:
        await connection.flush()
    assert given_up.cancelled_caught
    await nats_harness.thaw()
    connection.publish("given-up", b"")
    await deliver_all(connection, connection)
    await receive_messages(connection, 1)


async def test_a_subject_that_is_no_utf8_does_not_end_the_reading(nats_harness: NatsHarness) -> None:
    receiver = await nats_harness.connect()
    await receiver.subscribe("raw.>")
    url = urlsplit(nats_harness.server.url)
    with socket.create_connection((url.hostname, url.port)) as stream:
        login = f'CONNECT {{"user":"{url.username}","pass":"{url.password}","verbose":false}}\r\n'
        stream.sendall(login.encode() + b"PUB raw.\xff 1\r\nx\r\nPUB raw.end 0\r\n\r\nPING\r\n")
        first, second = await receive_messages(receiver, 2)
    assert (first.payload, second.subject) == (b"x", "raw.end")


async def test_logs_and_the_address_name_the_server_without_its_password(nats_harness: NatsHarness) -> None:
    with capture_logs() as logs:
        connection = await nats_harness.connect()
        await nats_harness.cut()
        await receive_until(connection, Disconnected)
        await nats_harness.mend()
        await receive_until(connection, Reconnected)
    _, _, password = nats_harness.server.credentials.partition(":")
    assert logs[0]["event"] == "bus_lost"
    assert all(entry["bus"] == nats_harness.server.public_url for entry in logs)
    assert password not in str(logs)


async def test_an_idle_connection_on_a_healthy_server_is_not_lost(nats_server: RefusingNatsServer) -> None:
    options = NatsOptions(urls=(nats_server.url,), ping_interval_s=0.02)
    connection = await NatsBus(options).connect(name="a", inbox="inbox.a")
    await connection.subscribe("idle")
    with anyio.move_on_after(0.5):
        lost = await connection.receive()
        pytest.fail(f"nothing happened, but {lost} was received")
    connection.publish("idle", b"")
    assert isinstance((await connection.receive())[0], Message)
    await connection.close()


async def test_a_server_process_that_is_told_to_end_is_noticed_at_once(nats_harness: NatsHarness) -> None:
    connection = await nats_harness.connect()
    nats_harness.server.signal(signal.SIGTERM)
    with anyio.fail_after(1.9):  # sooner than two pings could tell
        await receive_until(connection, Disconnected)
    await nats_harness.server.wait()
