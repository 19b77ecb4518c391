"""The end of a frontend: nothing new, what runs may finish, nobody is left without an answer."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from busllm.requests.generation import GenerationRequest
from busllm.stages.frontend.app import build_app
from busllm.stages.frontend.server import serve
from busllm.stages.frontend.settings import HttpTimings
from busllm.testing.fake_owner import FakeOwner, Step, word_delta
from busllm.testing.frontend_server import FrontendServer, fake_settings, read_all, serving
from busllm.testing.http_oracles import check_error
from busllm.topology.address import Address, bind
from tests.stages.frontend.test_leaving import pausing, raw_chat

pytestmark = pytest.mark.anyio


async def open_stream(server: FrontendServer) -> anyio.abc.SocketStream:
    """A stream that has had its first text."""
    stream = await server.connect()
    await stream.send(raw_chat(stream=True))
    received = b""
    while b"word0" not in received:
        received += await stream.receive()
    return stream


async def begin_drain(server: FrontendServer) -> None:
    server.shutdown.set()
    while not server.app.running.draining:
        await anyio.lowlevel.checkpoint()


async def test_new_requests_are_refused_with_the_listener_open_while_running_ones_finish() -> None:
    release = anyio.Event()
    owner = FakeOwner(pausing(release, 1))
    async with serving(owner) as server:
        stream = await open_stream(server)
        await begin_drain(server)
        refused = await server.client.post("/v1/chat/completions", content=b"{}")
        check_error(refused.status_code, refused.headers, refused.content, code="draining")
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) > 0
        assert (await server.client.get("/health")).status_code == 200
        assert (await server.client.get("/ready")).status_code == 503
        assert (await server.client.get("/v1/models")).status_code == 503
        assert (await server.client.get("/metrics")).status_code == 200
        release.set()
        rest = await read_all(stream)
        await stream.aclose()
        with anyio.fail_after(5):
            await server.stopped.wait()
    assert b"late" in rest
    assert b"[DONE]" in rest
    assert owner.aborted == []


@pytest.mark.parametrize("how", ["timeout", "hurry"])
async def test_what_does_not_finish_in_time_ends_with_an_error(how: str) -> None:
    owner = FakeOwner(pausing(anyio.Event(), 1))
    settings = fake_settings(drain_timeout_s=0.2 if how == "timeout" else 600.0)
    async with serving(owner, settings) as server:
        streams = [await open_stream(server) for _ in range(2)]
        whole = await server.connect()
        await whole.send(raw_chat(stream=False))
        await owner.wait_submitted(3)
        await begin_drain(server)
        if how == "hurry":
            server.hurry.set()
        with anyio.fail_after(5):
            rests = [await read_all(stream) for stream in streams]
            plain = await read_all(whole)
            await server.stopped.wait()
        for stream in (*streams, whole):
            await stream.aclose()
    assert all(b'data: {"error":' in rest and b"draining" in rest and b"[DONE]" not in rest for rest in rests)
    assert all(rest.endswith(b"0\r\n\r\n") for rest in rests)
    assert plain.startswith(b"HTTP/1.1 503")
    assert len(owner.aborted) == 3


async def test_a_client_that_does_not_read_does_not_hold_up_the_end() -> None:
    def endless(request: GenerationRequest) -> Iterator[Step]:
        while True:
            yield [word_delta(request, 0, 0, "x" * 100_000)]

    owner = FakeOwner(endless)
    settings = fake_settings(drain_timeout_s=0.2, timings=HttpTimings(stop_s=0.2))
    async with serving(owner, settings) as server:
        stream = await server.connect()
        await stream.send(raw_chat(stream=True))
        await owner.wait_submitted(1)
        await begin_drain(server)
        with anyio.fail_after(5):
            await server.stopped.wait()
        await stream.aclose()
    assert len(owner.aborted) == 1


async def test_idle_connections_do_not_hold_up_the_end() -> None:
    async with serving(FakeOwner()) as server:
        idle = await server.connect()
        assert (await server.client.get("/health")).status_code == 200
        server.shutdown.set()
        with anyio.fail_after(5):
            await server.stopped.wait()
            await read_all(idle)
        await idle.aclose()


async def test_after_the_end_nobody_is_accepted() -> None:
    async with serving(FakeOwner()) as server:
        server.shutdown.set()
        await server.stopped.wait()
        with pytest.raises(OSError, match=r".*"):
            await server.connect()


async def test_cancelling_the_server_tells_its_clients_too() -> None:
    settings = fake_settings()
    listener = bind(Address("127.0.0.1", 0))
    port = listener.getsockname()[1]
    app = build_app(FakeOwner(pausing(anyio.Event(), 1)), settings)
    stream = None
    async with anyio.create_task_group() as group:
        await group.start(serve, app, [listener], settings, anyio.Event())
        stream = await anyio.connect_tcp("127.0.0.1", port)
        await stream.send(raw_chat(stream=True))
        await stream.receive()
        group.cancel_scope.cancel()
    with anyio.fail_after(5):
        rest = await read_all(stream)
    await stream.aclose()
    assert b"draining" in rest
