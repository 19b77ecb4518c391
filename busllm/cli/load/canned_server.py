"""A server that answers every POST with the same stream, as fast as it can: what a load generator is measured against.

Owns: one canned answer, sent event by event.
Does not know: models, and nearly nothing of HTTP. Run as `python -m busllm.cli.load.canned_server EVENTS`; it prints
its port and ends when its standard input does.
"""

from __future__ import annotations

import re
import sys

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
_DONE = b"data: [DONE]\n\n"


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(text: str, **more: object) -> bytes:
    chunk = {
        "id": "cmpl-aaaaaaaaaaaaaaaaaaaa",
        "object": "text_completion",
        "created": 0,
        "model": "canned",
        "choices": [{"index": 0, "text": text, "finish_reason": None, "logprobs": None}],
        **more,
    }
    return b"data: %s\n\n" % msgspec.json.encode(chunk)


def answer_parts(num_events: int) -> list[bytes]:
    """The whole answer, in the pieces in which it is sent."""
    usage = {"prompt_tokens": 1, "completion_tokens": num_events, "total_tokens": num_events + 1}
    last = _framed(_event("", choices=[], usage=usage)) + _framed(_DONE) + b"0\r\n\r\n"
    return [_HEAD, *[_framed(_event(" word"))] * num_events, last]


async def _read_request(stream: anyio.abc.SocketStream) -> None:
    """Reads one request whole: a connection closed with unread bytes is reset, and its answer with it."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += await stream.receive()
    head, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length:\s*(\d+)", head)
    missing = (int(length[1]) if length is not None else 0) - len(body)
    while missing > 0:
        missing -= len(await stream.receive())


async def _serve(num_events: int) -> None:
    parts = answer_parts(num_events)

    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            try:
                await _read_request(stream)
                for part in parts:
                    await stream.send(part)
            except (anyio.BrokenResourceError, anyio.EndOfStream) as error:
                print(f"canned server: a client left: {error!r}", file=sys.stderr)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        print(listener.extra(anyio.abc.SocketAttribute.local_port), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(_serve, int(sys.argv[1]))
