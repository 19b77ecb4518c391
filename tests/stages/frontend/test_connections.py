"""HTTP itself: paths and methods, framing, limits, connections that are used again."""

from __future__ import annotations

import json
from typing import Any

import anyio
import anyio.abc
import pytest

from busllm.ids import is_uid
from busllm.stages.frontend.settings import HttpTimings
from busllm.testing.fake_owner import WORDS, FakeOwner, say
from busllm.testing.frontend_server import MODEL, fake_settings, read_all, serving
from busllm.testing.http_oracles import check_error

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


async def test_unknown_paths_are_404_in_the_one_envelope() -> None:
    async with serving(FakeOwner()) as server:
        for path in ("/", "/nope", "/v1", "/v1/models/", "/v1/chat/completions/", "/docs", "/%ff", "/a" * 1000):
            answer = await server.client.get(path)
            assert answer.status_code == 404, path
            check_error(404, answer.headers, answer.content, code="not_found")
            assert len(answer.headers["x-request-id"]) == 20


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, "POST"),
        ("DELETE", CHAT, "POST"),
        ("OPTIONS", CHAT, "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/health", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_405_and_says_which_are_right(method: str, path: str, allow: str) -> None:
    async with serving(FakeOwner()) as server:
        answer = await server.client.request(method, path)
    check_error(answer.status_code, answer.headers, answer.content, code="method_not_allowed")
    assert answer.status_code == 405
    assert answer.headers["allow"] == allow


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/v1/models", f"/v1/models/{MODEL}", "/metrics", "/openapi.json"]
)
async def test_head_is_get_without_a_body_and_leaves_no_stray_bytes(path: str) -> None:
    raw = f"HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with serving(FakeOwner()) as server:
        received = await server.exchange_bytes(raw.encode())
        whole = await server.client.get(path)
        head = await server.client.head(path)
    first, _, second = received.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200")
    assert second.startswith(b"HTTP/1.1 200")
    assert received.endswith(b'{"status":"ok"}')
    if path != "/metrics":  # its numbers change
        assert head.headers["content-length"] == str(len(whole.content))


@pytest.mark.parametrize(
    ("content_type", "accepted"),
    [
        (None, True),
        ("application/json", True),
        ("APPLICATION/JSON", True),
        ("application/json; charset=utf-8", True),
        ('application/json; charset="UTF-8"', True),
        ("application/json; charset=utf-16", False),
        ("application/x-www-form-urlencoded", False),
        ("text/plain", False),
        ("multipart/form-data; boundary=x", False),
        ("\xff", False),
    ],
)
async def test_json_is_the_only_content_type(content_type: str | None, accepted: bool) -> None:
    declared = "" if content_type is None else f"content-type: {content_type}\r\n"
    body = json.dumps(BODY)
    raw = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{declared}connection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    async with serving(FakeOwner()) as server:
        received = await server.exchange_bytes(raw.encode("latin-1"))
    assert received.startswith(b"HTTP/1.1 200" if accepted else b"HTTP/1.1 415")


async def test_a_body_over_the_limit_is_413_before_it_is_read() -> None:
    settings = fake_settings(max_body_bytes=1000, timings=HttpTimings(linger_s=0.1))
    async with serving(FakeOwner(), settings) as server:
        answer = await server.client.post(CHAT, json={**BODY, "user": "x" * 1000})
        within = await server.client.post(CHAT, json={**BODY, "user": "x" * 700})
        raw = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n01234567890123456789"
        with anyio.fail_after(5):
            huge = await server.exchange_bytes(raw.encode())
    check_error(answer.status_code, answer.headers, answer.content, code="request_too_large")
    assert answer.status_code == 413
    assert "1000" in answer.json()["error"]["message"]
    assert within.status_code == 200
    assert huge.startswith(b"HTTP/1.1 413")


async def test_an_endless_upload_is_answered_and_cut() -> None:
    async with serving(FakeOwner(), fake_settings(max_body_bytes=100_000, timings=HttpTimings(linger_s=0.2))) as server:
        stream = await server.connect()
        await stream.send(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())

        async def upload() -> None:
            try:
                while True:
                    await stream.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(upload)
                received = await read_all(stream)
        await stream.aclose()
        assert (await server.client.get("/health")).status_code == 200
        assert not len(server.app.running)
    assert received.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in received


@pytest.mark.parametrize("length", ["-1", "+5", "5, 6", "x", "", "1" * 40])
async def test_an_absurd_length_is_400(length: str) -> None:
    async with serving(FakeOwner()) as server:
        with anyio.fail_after(5):
            received = await server.exchange_bytes(
                f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n01234".encode()
            )
        assert (await server.client.get("/health")).status_code == 200
    assert received.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 70_000,
        b"GET /health HTTP/1.1\r\nhost: x" + b"".join(b"\r\nx-%d: %b" % (n, b"y" * 30) for n in range(2000)),
        b"GET /" + b"u" * 100_000 + b" HTTP/1.1\r\nhost: x",
    ],
    ids=["one header", "many headers", "url"],
)
async def test_an_oversized_head_is_431(head: bytes) -> None:
    async with serving(FakeOwner()) as server:
        received = await server.exchange_bytes(head + b"\r\nconnection: close\r\n\r\n")
        assert (await server.client.get("/health")).status_code == 200
    assert received.startswith(b"HTTP/1.1 431")
    assert b'"code":"head_too_large"' in received


async def test_an_endless_head_is_cut() -> None:
    async with serving(FakeOwner()) as server:
        received = await server.exchange_bytes(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 300_000)
        assert (await server.client.get("/health")).status_code == 200
    assert received.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("value", ["a b", "*", ">", "..", "$SYS.x", "x" * 5000])
async def test_a_clients_own_request_id_is_not_used(value: str) -> None:
    async with serving(FakeOwner()) as server:
        answer = await server.client.post(CHAT, json={**BODY, "user": value}, headers={"x-request-id": value})
    assert answer.status_code == 200
    assert is_uid(answer.headers["x-request-id"])


async def test_a_connection_is_used_again_after_errors_streams_and_unread_bodies() -> None:
    async with serving(FakeOwner(say(WORDS))) as server:
        connections: set[Any] = set()
        for number in range(300):
            match number % 5:
                case 0:
                    answer, status = await server.client.get("/health"), 200
                case 1:
                    answer, status = await server.client.post(CHAT, content=b"{"), 400
                case 2:
                    answer, status = (
                        await server.client.post("/nope", content=b'{"x":1}GET /health HTTP/1.1\r\n\r\n'),
                        404,
                    )
                case 3:
                    answer, status = await server.client.post(CHAT, json={**BODY, "stream": True}), 200
                case _:
                    answer, status = await server.client.get(CHAT), 405
            assert answer.status_code == status
            connections.add(answer.extensions["network_stream"])
    assert len(connections) == 1


async def test_an_early_answer_to_a_large_body_is_read_whole_and_closes_the_connection() -> None:
    """The client sends everything before it reads: without the lingering the answer would be lost to a reset."""
    body = b"x" * 3_000_000
    async with serving(FakeOwner(), fake_settings(max_body_bytes=1000)) as server:
        received = await server.exchange_bytes(
            b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
    assert received.startswith(b"HTTP/1.1 404")
    assert b"connection: close" in received
    assert received.count(b"HTTP/1.1") == 1


async def test_pipelined_requests_are_answered_in_order() -> None:
    raw = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /nope HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with serving(FakeOwner()) as server:
        received = await server.exchange_bytes(raw)
    assert [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404"]


@pytest.mark.parametrize(
    ("beginning", "status"),
    [
        (b"POST / HTTP/1.1\r\nX:", None),
        (b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{" % CHAT.encode(), b"408"),
        (b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{" % CHAT.encode(), b"408"),
        (b"", None),
    ],
    ids=["half a head", "half a body", "half a chunk", "nothing"],
)
async def test_half_a_request_is_not_waited_for_for_ever(beginning: bytes, status: bytes | None) -> None:
    timings = HttpTimings(keep_alive_s=0.2, body_wait_s=0.2, linger_s=0.1)
    async with serving(FakeOwner(), fake_settings(timings=timings)) as server:
        streams = [await server.connect() for _ in range(20)]
        answers: list[bytes] = []

        async def drip(stream: anyio.abc.SocketStream) -> None:
            await stream.send(beginning)
            answers.append(await read_all(stream))
            await stream.aclose()

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                for stream in streams:
                    group.start_soon(drip, stream)
                answer = await server.client.post(CHAT, json=BODY)
    assert answer.status_code == 200
    assert len(answers) == 20
    assert all(received[9:12] == (status or b"") for received in answers)


async def test_a_large_body_does_not_hold_up_other_requests() -> None:
    prompt = "word " * 1_000_000
    async with serving(FakeOwner()) as server:
        longest_s = 0.0
        async with anyio.create_task_group() as group:

            async def large() -> None:
                many = [{"role": "user", "content": "hello"}] * 4000
                await server.client.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
                await server.client.post(CHAT, json={"model": MODEL, "messages": many})
                group.cancel_scope.cancel()

            group.start_soon(large)
            while True:
                began_at = anyio.current_time()
                assert (await server.client.get("/health")).status_code == 200
                longest_s = max(longest_s, anyio.current_time() - began_at)
    assert longest_s < 0.5


async def test_a_websocket_is_refused() -> None:
    raw = (
        b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    async with serving(FakeOwner()) as server:
        received = await server.exchange_bytes(raw)
    assert received.startswith(b"HTTP/1.1 403")
