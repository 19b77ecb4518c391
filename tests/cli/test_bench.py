"""`busllm bench`: the workload, raw HTTP, the figures, the files."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busllm.bus.memory import MemoryBus
from busllm.cli.bench import rows_of
from busllm.cli.http_target import HttpFailure, HttpTarget
from busllm.cli.load.canned_server import answer_parts
from busllm.cli.load.ceiling import measure_ceiling
from busllm.cli.load.http_stream import Unchunked
from busllm.cli.load.measured import Measured, measure
from busllm.cli.load.picture import page, panels_of, svg
from busllm.cli.load.report import percentiles, report
from busllm.cli.load.run import Run, run
from busllm.cli.load.workload import Workload
from busllm.cli.main import main
from busllm.testing.frontend_server import MODEL, fake_settings, serving
from busllm.testing.stack import StackConfig, running_stack

PATIENCE_S = 30.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
WORD = b'data: {"choices": [{"text": "word"}]}\n\n'


# ------------------------------------------------------------ the workload


def test_the_same_seed_gives_the_same_requests_and_no_two_prompts_are_alike() -> None:
    workload = Workload(requests=20, spread=True, shared_words=5)
    assert workload.bodies("m") == workload.bodies("m")
    assert workload.bodies("m") != msgspec.structs.replace(workload, seed=8).bodies("m")
    prompts = [json.loads(body)["prompt"] for body in workload.bodies("m")]
    assert len(set(prompts)) == 20
    assert len({tuple(prompt.split()[:5]) for prompt in prompts}) == 1


def test_spread_draws_lengths_between_a_quarter_and_the_whole() -> None:
    bodies = [
        json.loads(body) for body in Workload(requests=200, input_words=40, output_tokens=80, spread=True).bodies("m")
    ]
    num_words = {len(body["prompt"].split()) - 1 for body in bodies}
    num_tokens = {body["max_tokens"] for body in bodies}
    assert (min(num_words), max(num_words)) == (10, 40)
    assert (min(num_tokens), max(num_tokens)) == (20, 80)


def test_a_chat_asks_with_messages_and_eos_is_ignored_only_where_the_server_may_be_told() -> None:
    [chat] = [json.loads(body) for body in Workload(requests=1, chat=True, ignore_eos=False).bodies("m")]
    assert chat["messages"][0]["role"] == "user"
    assert "ignore_eos" not in chat
    [plain] = [json.loads(body) for body in Workload(requests=1).bodies("m")]
    assert (plain["ignore_eos"], plain["stream_options"]) == (True, {"include_usage": True})


# ------------------------------------------------------------ raw HTTP


@given(pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=6), step=st.integers(1, 50))
def test_chunks_are_unframed_wherever_the_bytes_are_cut(pieces: list[bytes], step: int) -> None:
    framed = b"".join(b"%X;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    unframe = Unchunked()
    parts = [framed[at : at + step] for at in range(0, len(framed), step)]
    assert b"".join(map(unframe.feed, parts)) == b"".join(pieces)
    assert unframe.is_complete


def test_what_is_no_chunk_size_is_refused() -> None:
    with pytest.raises(HttpFailure):
        Unchunked().feed(b"nothing\r\n")


Conversation = Callable[[anyio.abc.SocketStream], Awaitable[None]]


async def measured_against(talk: Conversation, timeout_s: float = 5.0) -> Measured:
    """One request to a server that says what the test wants."""

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await talk(stream)

    with anyio.fail_after(PATIENCE_S):
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, serve)
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            result = await measure(HttpTarget(f"http://127.0.0.1:{port}", None), "/v1/completions", b"{}", timeout_s)
            tasks.cancel_scope.cancel()
    return result


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (HEAD + b"\r\n" + WORD + b"data: [DONE]\n\n", None),
        (HEAD + b"content-length: 55\r\n\r\n" + WORD + b"data: [DONE]\n\n", None),
        (HEAD + b"content-length: 999\r\n\r\n" + WORD, "ended inside"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\ndata", "ended inside"),
        (HEAD + b"\r\n" + WORD, "without [DONE]"),
        (HEAD + b'\r\ndata: {"error": {"message": "aborted"}}\n\n', "aborted"),
        (HEAD + b"\r\ndata: {]\n\n", "no chunk"),
        (b'HTTP/1.1 429 Busy\r\n\r\n{"error": {"code": "queue_full", "message": "later"}}', "429 queue_full later"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP"),
        (b"", "without an answer"),
    ],
)
async def test_every_way_an_answer_can_end_is_told_apart(sent: bytes, error: str | None) -> None:
    async def talk(stream: anyio.abc.SocketStream) -> None:
        for at in range(0, len(sent), 7):  # in small pieces
            await stream.send(sent[at : at + 7])

    measured = await measured_against(talk)
    if error is None:
        assert (measured.error, len(measured.text_s)) == (None, 1)
    else:
        assert measured.error is not None
        assert error in measured.error


@pytest.mark.anyio
async def test_an_answer_that_comes_with_its_head_in_one_large_piece_is_read_whole() -> None:
    num_words = 100 * 1024 // len(WORD)

    async def talk(stream: anyio.abc.SocketStream) -> None:
        await stream.send(HEAD + b"\r\n" + WORD * num_words + b"data: [DONE]\n\n")

    measured = await measured_against(talk)
    assert (measured.error, len(measured.text_s)) == (None, num_words)


@pytest.mark.anyio
async def test_a_server_that_never_ends_is_given_up_in_time() -> None:
    measured = await measured_against(lambda _: anyio.sleep_forever(), timeout_s=0.1)
    assert measured.error == "not complete after 0.1 s"


@pytest.mark.anyio
async def test_a_server_that_is_not_there_is_a_failed_request() -> None:
    measured = await measure(HttpTarget("http://127.0.0.1:1", None), "/", b"", 5.0)
    assert measured.error is not None


# ------------------------------------------------------------ the figures


def made_run() -> Run:
    """Two good requests and a failed one, with times that are easily added up."""
    good = [Measured(10.0, [10.1, 10.2, 10.4], 10.4, 5, 3), Measured(10.0, [10.3, 10.4], 10.4, None, None)]
    return Run([*good, Measured(10.0, [10.1], 10.2, error="500 broken")], 10.0, 12.0, 1.6)


def test_figures_count_the_good_requests_alone() -> None:
    made = report(made_run(), url="u", model="m", concurrency=2, workload=Workload(requests=3))
    assert (made.ok, made.failed, made.errors) == (2, 1, {"500 broken": 1})
    assert (made.input_tokens, made.output_tokens) == (5, 5)
    assert (made.output_tokens_per_s, made.total_tokens_per_s, made.requests_per_s) == (2.5, 5.0, 1.0)
    assert made.ttft_ms is not None
    assert (made.ttft_ms.p50, made.ttft_ms.max) == (100.0, 300.0)
    assert made.inter_token_ms is not None
    assert (made.inter_token_ms.p50, made.inter_token_ms.max) == (100.0, 200.0)
    assert made.generator_busy == 0.8
    assert made.is_doubtful


def test_percentiles_are_values_that_were_seen() -> None:
    found = percentiles([float(value) for value in range(1, 201)])
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max) == (100.0, 180.0, 198.0, 200.0)
    assert percentiles([]) is None


def test_the_picture_is_whole_xml_and_the_page_needs_nothing_from_elsewhere() -> None:
    done = made_run()
    made = report(done, url="http://<&>", model="m", concurrency=2, workload=Workload())
    picture = svg(panels_of(done, made), "a <title> & more")
    assert len(xml.etree.ElementTree.fromstring(picture).findall("{http://www.w3.org/2000/svg}g")) == 3
    whole = page(picture, "a <title>", rows_of(made))
    assert "<script" not in whole
    assert "src=" not in whole
    assert "http://&lt;&amp;&gt;" in whole


def test_a_run_without_one_good_request_can_still_be_drawn() -> None:
    done = Run([Measured(1.0, error="no")], 1.0, 2.0, 0.1)
    made = report(done, url="u", model="m", concurrency=1, workload=Workload())
    assert (made.ttft_ms, made.inter_token_ms) == (None, None)
    assert panels_of(done, made) == []
    xml.etree.ElementTree.fromstring(svg([], "nothing"))


# ------------------------------------------------------------ whole runs


@pytest.mark.anyio
async def test_a_run_against_the_real_frontend_counts_what_was_asked_for() -> None:
    workload = Workload(requests=12, input_words=5, output_tokens=10, chat=True)
    seen: list[Measured] = []
    with anyio.fail_after(PATIENCE_S):
        async with (
            running_stack(MemoryBus(), StackConfig()) as stack,
            serving(stack.owner, fake_settings()) as server,
        ):
            target = HttpTarget(server.url, None)
            done = await run(
                target, workload.path, workload.bodies(MODEL), concurrency=4, timeout_s=10, on_done=seen.append
            )
    made = report(done, url=target.url, model=MODEL, concurrency=4, workload=workload)
    assert (made.ok, made.failed, made.output_tokens, len(seen)) == (12, 0, 120, 12)
    assert made.input_tokens > 12 * 5
    assert all(one.began_s <= one.text_s[0] <= one.ended_s for one in done.measured)


@pytest.mark.anyio
async def test_never_more_requests_run_at_a_time_than_asked_for() -> None:
    parts = b"".join(answer_parts(1))
    running, most, served = 0, 0, 0

    async def serve(stream: anyio.abc.SocketStream) -> None:
        nonlocal running, most, served
        async with stream:
            running += 1
            most = max(most, running)
            await stream.receive()
            await anyio.lowlevel.checkpoint()
            running -= 1
            served += 1
            await stream.send(parts)

    with anyio.fail_after(PATIENCE_S):
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, serve)
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            target = HttpTarget(f"http://127.0.0.1:{port}", None)
            done = await run(target, "/", [b"{}"] * 20, concurrency=3, timeout_s=5, on_done=lambda _: None)
            tasks.cancel_scope.cancel()
    assert most <= 3
    assert served == 20
    assert all(one.error is None for one in done.measured)


@pytest.mark.anyio
async def test_the_generators_own_ceiling_is_measured_by_its_own_time() -> None:
    """How high it is depends on the machine; that it counts no time in which it waits for the server does not."""
    with anyio.fail_after(PATIENCE_S):
        ceiling = await measure_ceiling(Workload(requests=8), concurrency=4)
    assert ceiling.events_per_busy_s >= ceiling.events_per_s > 0


@pytest.mark.parametrize(
    "words",
    [
        ["--requests", "0"],
        ["--concurrency", "many"],
        ["--plot", "picture.png"],
        ["--json", "/no/such/folder/figures.json"],
        ["--url", "ftp://host"],
    ],
)
def test_a_mistake_in_a_flag_ends_with_2_before_anything_is_sent(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["bench", *words])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    assert words[0] in capsys.readouterr().err


def test_figures_and_picture_are_written_where_they_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that is not there: every request fails, the files are written all the same, the status says it."""
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.html"
    words = ["--url", "http://127.0.0.1:1", "--model", "m", "--requests", "2", "--warmup", "0"]
    assert main(["bench", *words, "--json", str(figures), "--plot", str(picture)]) == 1
    assert json.loads(figures.read_text())["failed"] == 2
    assert picture.read_text().startswith("<!doctype html>")
    assert "ok / failed" in capsys.readouterr().out
