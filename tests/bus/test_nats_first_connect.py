"""The first connect to a NATS server: it waits for one that is not there yet, says why, and gives up only when it is
refused."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from busllm.bus.nats import NatsBus
from busllm.bus.nats_options import NatsOptions
from busllm.bus.nats_server import EmbeddedNatsServer, NatsServerOptions
from busllm.bus.retry import RetryTimings
from busllm.errors import BusPermissionDenied
from busllm.testing.bus_harness import PATIENCE_S, REFUSED_PREFIX
from busllm.testing.nats_harness import QUICK_RETRY, RefusingNatsServer

pytestmark = pytest.mark.anyio

Handler = Callable[[anyio.abc.SocketStream], Awaitable[None]]


class Attempts:
    """Counts connections to a listener."""

    def __init__(self) -> None:
        self.began_at: list[float] = []
        self._changed = anyio.Event()

    def count(self) -> None:
        self.began_at.append(time.monotonic())
        self._changed.set()
        self._changed = anyio.Event()

    async def wait_for(self, number: int) -> None:
        with anyio.fail_after(PATIENCE_S):
            while len(self.began_at) < number:
                await self._changed.wait()


@asynccontextmanager
async def listener_of(handle: Handler) -> AsyncIterator[str]:
    """The URL of a port on which `handle` serves until the client has gone."""

    async def serve(stream: anyio.abc.SocketStream) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            await handle(stream)

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        yield f"nats://secret@127.0.0.1:{port}"
        tasks.cancel_scope.cancel()


async def connect_until(options: NatsOptions, attempts: Attempts, number: int) -> None:
    """Tries to connect until the listener has counted that many attempts."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: NatsBus(options).connect(name="a", inbox="inbox.a"))
        await attempts.wait_for(number)
        tasks.cancel_scope.cancel()


async def test_wrong_credentials_are_an_error_at_once(nats_server: RefusingNatsServer) -> None:
    wrong = nats_server.public_url.replace("nats://", "nats://tester:wrong@")
    with anyio.fail_after(PATIENCE_S), pytest.raises(BusPermissionDenied, match="credentials"):
        await NatsBus(NatsOptions(urls=(wrong,))).connect(name="a", inbox="inbox.a")


async def test_a_refused_inbox_is_an_error_at_once(nats_server: RefusingNatsServer) -> None:
    with anyio.fail_after(PATIENCE_S), pytest.raises(BusPermissionDenied, match="inbox"):
        await NatsBus(NatsOptions(urls=(nats_server.url,))).connect(name="a", inbox=f"{REFUSED_PREFIX}.inbox")


async def test_a_port_that_accepts_and_closes_is_tried_with_growing_pauses_and_one_log_line() -> None:
    attempts = Attempts()

    async def close_at_once(stream: anyio.abc.SocketStream) -> None:
        attempts.count()
        await stream.aclose()

    retry = RetryTimings(first_pause_s=0.05, max_pause_s=0.2)
    with capture_logs() as logs:
        async with listener_of(close_at_once) as url:
            await connect_until(NatsOptions(urls=(url,), retry=retry), attempts, 6)
            public = url.replace("secret@", "")
    pauses = [after - before for before, after in zip(attempts.began_at, attempts.began_at[1:], strict=False)]
    assert all(pause >= least for pause, least in zip(pauses, [0.025, 0.05, 0.1, 0.1, 0.1], strict=False)), pauses
    [line] = logs
    assert (line["event"], line["log_level"], line["url"]) == ("bus_unreachable", "warning", public)
    assert line["cause"]
    assert "secret" not in str(logs)


async def test_a_port_that_says_nothing_is_given_up_and_tried_again() -> None:
    attempts = Attempts()

    async def say_nothing(stream: anyio.abc.SocketStream) -> None:
        attempts.count()
        async with stream:
            await stream.receive()

    with capture_logs() as logs:
        async with listener_of(say_nothing) as url:
            await connect_until(NatsOptions(urls=(url,), retry=QUICK_RETRY, connect_timeout_s=1), attempts, 2)
    assert logs[0]["cause"] == "no answer within 1 s"


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 600_000, b"INFO {broken\r\n"])
async def test_a_port_of_something_else_is_said_to_be_no_nats_server(greeting: bytes) -> None:
    attempts = Attempts()

    async def greet(stream: anyio.abc.SocketStream) -> None:
        attempts.count()
        async with stream:
            await stream.send(greeting)
            await stream.receive()

    with capture_logs() as logs:
        async with listener_of(greet) as url:
            await connect_until(NatsOptions(urls=(url,), retry=QUICK_RETRY), attempts, 2)
    assert logs[0]["event"] == "bus_unreachable"
    assert logs[0]["cause"]


async def test_attempts_that_fail_in_the_handshake_leave_no_task_and_no_log_line_of_nats_py_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = Attempts()

    async def close_after_connect(stream: anyio.abc.SocketStream) -> None:
        attempts.count()
        async with stream:
            await stream.send(b'INFO {"max_payload":4096}\r\n')
            await stream.receive()

    num_before = len(anyio.get_running_tasks())
    async with listener_of(close_after_connect) as url:
        await connect_until(NatsOptions(urls=(url,), retry=QUICK_RETRY), attempts, 5)
    await anyio.wait_all_tasks_blocked()
    assert len(anyio.get_running_tasks()) == num_before
    assert [record for record in caplog.records if not record.name.startswith("busllm.")] == []


async def test_a_server_that_starts_later_is_found(tmp_path: Path) -> None:
    server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=tmp_path))
    await server.start()
    await server.stop()
    bus = NatsBus(NatsOptions(urls=(server.url,), retry=QUICK_RETRY))
    is_connected = anyio.Event()

    async def connect() -> None:
        connection = await bus.connect(name="a", inbox="inbox.a")
        await connection.close()
        is_connected.set()

    with anyio.fail_after(PATIENCE_S), capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connect)
            while not logs:  # the first failure is told at once
                await anyio.lowlevel.checkpoint()
            assert not is_connected.is_set()
            await server.start()
            await is_connected.wait()
    await server.stop()


async def test_of_several_urls_one_that_answers_is_enough(nats_server: RefusingNatsServer) -> None:
    attempts = Attempts()

    async def close_at_once(stream: anyio.abc.SocketStream) -> None:
        attempts.count()
        await stream.aclose()

    async with listener_of(close_at_once) as url:
        bus = NatsBus(NatsOptions(urls=(url, nats_server.url), retry=QUICK_RETRY))
        with anyio.fail_after(PATIENCE_S):
            connection = await bus.connect(name="a", inbox="inbox.a")
    assert len(attempts.began_at) == 1
    assert connection.is_connected
    await connection.close()


async def test_where_tls_is_demanded_nothing_is_said_to_a_server_without_it() -> None:
    attempts = Attempts()
    heard: list[bytes] = []

    async def offer_no_tls(stream: anyio.abc.SocketStream) -> None:
        attempts.count()
        async with stream:
            await stream.send(b'INFO {"auth_required":true,"max_payload":4096}\r\n')
            heard.append(await stream.receive())

    with capture_logs() as logs:
        async with listener_of(offer_no_tls) as url:
            options = NatsOptions(urls=(url.replace("nats://", "tls://"),), retry=QUICK_RETRY)
            await connect_until(options, attempts, 2)
    assert heard == []
    assert "TLS" in logs[0]["cause"]
