"""Clients that leave or do not read, and the time at which the status leaves."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from busllm.errors import StageMissing
from busllm.requests.generation import GenerationRequest
from busllm.stages.frontend.settings import HttpTimings
from busllm.testing.fake_owner import FakeOwner, Script, Step, last_delta, say, word_delta
from busllm.testing.frontend_server import MODEL, FrontendServer, fake_settings, read_all, serving
from busllm.testing.http_oracles import check_stream

pytestmark = pytest.mark.anyio


def raw_chat(*, stream: bool, close: bool = False) -> bytes:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": stream}).encode()
    connection = b"close" if close else b"keep-alive"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"connection: %b\r\ncontent-length: %d\r\n\r\n%b" % (connection, len(body), body)


def pausing(before: anyio.Event, num_words_first: int) -> Script:
    """Says some words, waits for the event, says the rest."""

    def script(request: GenerationRequest) -> Iterator[Step]:
        for number in range(num_words_first):
            yield [word_delta(request, 0, number, f"word{number} ")]
        yield before
        yield [word_delta(request, 0, num_words_first, "late")]
        yield [last_delta(request, 0, num_words_first + 1, "stop")]

    return script


def reset(stream: anyio.abc.SocketStream) -> None:
    """Makes the close that follows a reset."""
    raw: socket.socket = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def leave(stream: anyio.abc.SocketStream, how: str) -> None:
    match how:
        case "close":
            await stream.aclose()
        case "reset":
            reset(stream)
            await stream.aclose()
        case "half-close":
            await stream.send_eof()


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("when", ["before the first text", "in the middle"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_aborts_its_request(how: str, when: str, streamed: bool) -> None:
    owner = FakeOwner(pausing(anyio.Event(), 2 if when == "in the middle" else 0))
    async with serving(owner) as server:
        stream = await server.connect()
        await stream.send(raw_chat(stream=streamed))
        if streamed and when == "in the middle":
            received = b""
            while b"word1" not in received:
                received += await stream.receive()
        await owner.wait_submitted(1)
        await leave(stream, how)
        with anyio.fail_after(5):
            await owner.wait_aborted(1)
        await stream.aclose()
        assert len(owner.aborted) == 1
        assert (await server.client.get("/health")).status_code == 200


async def test_only_the_request_of_the_client_that_left_is_aborted() -> None:
    release = anyio.Event()
    owner = FakeOwner(pausing(release, 1))
    async with serving(owner) as server:
        stays, leaves = await server.connect(), await server.connect()
        await stays.send(raw_chat(stream=True, close=True))
        await owner.wait_submitted(1)
        await leaves.send(raw_chat(stream=True))
        await owner.wait_submitted(2)
        await leaves.aclose()
        await owner.wait_aborted(1)
        release.set()
        raw = await read_all(stays)
        await stays.aclose()
    assert b"late" in raw
    assert raw.endswith(b"0\r\n\r\n")
    assert len(owner.aborted) == 1


async def test_a_request_that_ends_by_itself_is_not_aborted() -> None:
    owner = FakeOwner()
    async with serving(owner) as server:
        for streamed in (True, False):
            raw = await server.exchange_bytes(raw_chat(stream=streamed, close=True))
            assert raw.startswith(b"HTTP/1.1 200")
    assert owner.aborted == []


async def test_a_client_that_does_not_read_loses_its_request() -> None:
    def endless(request: GenerationRequest) -> Iterator[Step]:
        while True:
            yield [word_delta(request, 0, 0, "x" * 100_000)]

    owner = FakeOwner(endless)
    settings = fake_settings(timings=HttpTimings(unread_s=0.5))
    async with serving(owner, settings) as server:
        stream = await server.connect()
        await stream.send(raw_chat(stream=True))
        with anyio.fail_after(10):
            await owner.wait_aborted(1)
            await wait_until_idle(server)  # the connection's end does not wait for the client either
        await stream.aclose()


async def wait_until_idle(server: FrontendServer) -> None:
    while len(server.app.running):
        await anyio.lowlevel.checkpoint()


async def test_the_status_waits_for_the_first_text_and_leaves_with_a_ping_when_that_takes_long() -> None:
    release = anyio.Event()
    owner = FakeOwner(pausing(release, 0))
    async with serving(owner, fake_settings(timings=HttpTimings(header_wait_s=0.1))) as server:
        stream = await server.connect()
        await stream.send(raw_chat(stream=True, close=True))
        received = b""
        while b": ping\n\n" not in received:
            received += await stream.receive()
        assert received.startswith(b"HTTP/1.1 200")
        assert b"data:" not in received
        release.set()
        received += await read_all(stream)
        await stream.aclose()
    assert b"late" in received
    assert b"[DONE]" in received


async def test_a_failure_after_the_first_ping_is_an_error_event() -> None:
    release = anyio.Event()

    def script(request: GenerationRequest) -> Iterator[Step]:
        yield release
        yield StageMissing("scheduler")

    async with serving(FakeOwner(script), fake_settings(timings=HttpTimings(header_wait_s=0.05))) as server:
        stream = await server.connect()
        await stream.send(raw_chat(stream=True, close=True))
        received = b""
        while b": ping\n\n" not in received:
            received += await stream.receive()
        release.set()
        received += await read_all(stream)
        await stream.aclose()
    assert b'data: {"error":' in received
    assert b"stage_unavailable" in received
    assert b"[DONE]" not in received


async def test_silence_in_a_stream_is_filled_with_pings() -> None:
    release = anyio.Event()
    owner = FakeOwner(pausing(release, 1))
    async with serving(owner, fake_settings(timings=HttpTimings(ping_s=0.05))) as server:
        async with server.client.stream(
            "POST",
            "/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True},
        ) as answer:
            received = b""
            async for chunk in answer.aiter_raw():
                received += chunk
                if received.count(b": ping\n\n") == 3:
                    release.set()
        choices = check_stream(received, 1, chat=True)
    assert choices[0].text == "word0 late"


async def test_tokens_without_text_do_not_start_the_stream() -> None:
    release = anyio.Event()

    def script(request: GenerationRequest) -> Iterator[Step]:
        yield [word_delta(request, 0, 0, "")]
        yield StageMissing("scheduler")

    async with serving(FakeOwner(script)) as server:
        raw = await server.exchange_bytes(raw_chat(stream=True, close=True))
    release.set()
    assert raw.startswith(b"HTTP/1.1 503")


async def test_many_streams_at_once_are_each_whole() -> None:
    owner = FakeOwner(say([f"word{number} " for number in range(50)]))
    async with serving(owner) as server:
        texts: list[bytes] = []

        async def one() -> None:
            texts.append(await server.exchange_bytes(raw_chat(stream=True, close=True)))

        async with anyio.create_task_group() as group:
            for _ in range(40):
                group.start_soon(one)
    assert len(texts) == 40
    assert all(text.count(b"word") == 50 and b"[DONE]" in text for text in texts)
    assert owner.aborted == []
