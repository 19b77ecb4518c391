"""`busllm bench --arriving`: when the long prompt is sent, and which pauses of the others it is held to account for."""

from __future__ import annotations

import json

import anyio
import anyio.abc
import pytest

from busllm.cli.bench import rows_of
from busllm.cli.http_target import HttpTarget
from busllm.cli.load.arrival import pauses_meanwhile_ms
from busllm.cli.load.measured import Measured
from busllm.cli.load.report import report
from busllm.cli.load.run import Run, run
from busllm.cli.load.workload import Workload

PATIENCE_S = 30.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
WORD = b'data: {"choices": [{"text": "word"}]}\n\n'
DONE = b"data: [DONE]\n\n"
LONG = b'{"long": true}'


class WaitingStreams:
    """A server whose short answers stand still after a word until the long request has come."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._long_came = anyio.Event()

    async def serve(self, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            request = b""
            while not request.endswith((LONG, b"{}")):
                request += await stream.receive()
            is_long = request.endswith(LONG)
            self.seen.append("long" if is_long else "short")
            await stream.send(HEAD + WORD)
            if is_long:
                self._long_came.set()
            await self._long_came.wait()
            await stream.send(WORD + DONE)


async def load(server: WaitingStreams, num_streams: int) -> Run:
    with anyio.fail_after(PATIENCE_S):
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, server.serve)
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            target = HttpTarget(f"http://127.0.0.1:{port}", None)
            done = await run(
                target,
                "/",
                [b"{}"] * num_streams,
                concurrency=num_streams,
                timeout_s=PATIENCE_S,
                on_done=lambda _: None,
                arriving_body=LONG,
            )
            tasks.cancel_scope.cancel()
    return done


@pytest.mark.anyio
async def test_the_long_prompt_is_sent_when_every_stream_has_begun_and_is_waited_for() -> None:
    server = WaitingStreams()
    done = await load(server, 3)
    assert server.seen == ["short", "short", "short", "long"]
    assert done.arrived is not None
    assert done.arrived.error is None
    assert all(one.text_s[0] <= done.arrived.began_s <= one.text_s[1] for one in done.measured)
    assert done.ended_s >= done.arrived.ended_s


@pytest.mark.anyio
async def test_a_long_prompt_whose_moment_never_came_is_a_failed_request() -> None:
    """The streams fail before their first text."""
    done = await run(
        HttpTarget("http://127.0.0.1:1", None),
        "/",
        [b"{}"] * 2,
        concurrency=2,
        timeout_s=PATIENCE_S,
        on_done=lambda _: None,
        arriving_body=LONG,
    )
    made = report(done, url="u", model="m", concurrency=2, workload=Workload(requests=2))
    assert made.failed == 3
    assert made.arrival is not None
    assert "not sent" in (made.arrival.error or "")


def test_every_pause_counts_that_overlaps_the_long_request() -> None:
    arrived = Measured(10.0, [11.0], 12.0, 4000, 96)
    stopped = Measured(9.0, [9.5, 9.9, 12.1, 12.2], 13.0)  # one pause from before it to after it
    untouched = Measured(9.0, [9.1, 9.2, 12.5, 12.6], 13.0, error="500")
    steady = Measured(9.0, [10.25, 10.5, 10.75], 11.0)
    assert pauses_meanwhile_ms(arrived, [stopped, untouched, steady]) == pytest.approx([250.0, 250.0, 2200.0])


def test_the_figures_tell_of_the_long_prompt_apart_from_the_others() -> None:
    streams = [Measured(9.0, [9.5, 10.5, 11.5], 11.5, 5, 3)]
    done = Run(streams, 9.0, 13.0, 0.1, Measured(10.0, [11.0, 12.0], 12.5, 4000, 96))
    made = report(done, url="u", model="m", concurrency=1, workload=Workload(requests=1))
    assert (made.ok, made.failed, made.output_tokens) == (1, 0, 3)
    arrival = made.arrival
    assert arrival is not None
    assert (arrival.input_tokens, arrival.ttft_ms, arrival.duration_ms) == (4000, 1000.0, 2500.0)
    assert (arrival.num_pauses, arrival.streams_inter_token_ms and arrival.streams_inter_token_ms.max) == (2, 1000.0)
    assert ("long prompt", "4000 tokens in, 96 out; first text after 1000 ms, done after 2500 ms") in rows_of(made)


def test_the_long_prompt_is_of_the_length_asked_for_and_as_random_as_the_seed() -> None:
    workload = Workload(requests=2, arriving_words=40, arriving_output_tokens=3, temperature=0.8, top_p=0.95)
    body = json.loads(workload.arriving_body("m") or b"")
    assert len(body["prompt"].split()) == 40
    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (3, 0.8, 0.95)
    assert workload.arriving_body("m") != Workload(seed=8, arriving_words=40).arriving_body("m")
    assert Workload().arriving_body("m") is None
