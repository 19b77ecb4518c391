"""`busllm trace`: timelines, the latest requests, following."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import pytest

from busllm.cli.main import main
from busllm.cli.trace import follow, show_latest, show_one
from busllm.cli.trace_view import rows_of, summaries, timeline
from busllm.client import Client
from busllm.ids import new_uid
from busllm.telemetry.trace import TraceEvent
from busllm.testing.stack import Stack, request
from tests.cli.conftest import CLUSTER

Cluster = tuple[Stack, str]


async def finished_request(stack: Stack, prompt: str = "hello") -> str:
    """The uid of a request that has ended."""
    live = stack.owner.submit(request(prompt, max_tokens=5))
    async for _ in live:
        pass
    return live.uid


@pytest.mark.anyio
async def test_a_timeline_has_every_stage_in_the_order_of_the_path(
    cluster: Cluster, operator: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    uid = await finished_request(cluster[0])
    assert await show_one(operator, uid, as_json=False) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == uid
    instances = [line.split()[0] for line in lines[1:] if not line.startswith(" ")]
    assert [instance.split("-")[0] for instance in instances] == ["client", "tokenizer", "scheduler", "detokenizer"]
    assert "cached_tokens=0" in "".join(lines)
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.anyio
async def test_a_request_that_nobody_remembers_ends_with_1(
    operator: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await show_one(operator, new_uid(), as_json=False) == 1
    assert "no stage remembers" in capsys.readouterr().err


@pytest.mark.anyio
async def test_the_latest_requests_are_one_line_each_the_latest_last(
    cluster: Cluster, operator: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    uids = [await finished_request(cluster[0], prompt) for prompt in ("one", "two", "three")]
    assert await show_latest(operator, 2, as_json=False) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "uid"
    assert [line.split()[0] for line in lines] == uids[-2:]
    last = lines[-1].split()
    assert (last[2], last[3], last[4], last[6]) == ("5", "0", "5", "finished")
    assert last[7:] == ["client-0", "tokenizer-0", "scheduler-0", "detokenizer-0"]


@pytest.mark.anyio
async def test_json_prints_the_events_as_they_are(
    cluster: Cluster, operator: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    uid = await finished_request(cluster[0])
    await show_one(operator, uid, as_json=True)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {event["uid"] for event in events} == {uid}
    assert {"uid", "stage", "instance", "event", "at", "elapsed_ms", "data"} == set(events[0])
    assert {"received", "tokenized", "admitted", "first_token", "finished"} <= {event["event"] for event in events}


@pytest.mark.anyio
async def test_following_one_request_tells_its_past_and_ends_with_it(
    cluster: Cluster, operator: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    stack, _ = cluster
    live = stack.owner.submit(request("followed", max_tokens=5000))
    await stack.wait_for(lambda: live.has_text)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow, operator, live.uid)
        await stack.wait_for(lambda: "first_token" in capsys.readouterr().out)
        stack.owner.abort(live.uid)
    lines = capsys.readouterr().out.splitlines()
    assert any("aborted" in line for line in lines)
    assert all(live.uid in line for line in lines)


@pytest.mark.anyio
async def test_following_a_request_that_has_ended_prints_it_and_returns(
    cluster: Cluster, operator: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    uid = await finished_request(cluster[0])
    assert await follow(operator, uid, as_json=True) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(events) == len({json.dumps(event) for event in events}) > 5


@pytest.mark.anyio
async def test_following_returns_when_a_request_of_many_events_has_ended(
    cluster: Cluster, operator: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    stack, _ = cluster
    owner = stack.actors["owner:0"].trace
    live = stack.owner.submit(request("long", max_tokens=5))
    for number in range(200):
        owner.record(live.uid, "delta", choice=0, token_ids=[number])
    async for _ in live:
        pass
    with anyio.fail_after(10):
        assert await follow(operator, live.uid, as_json=True) == 0
    assert '"client"' in capsys.readouterr().out


@pytest.mark.anyio
async def test_the_command_finds_a_cluster_by_its_bus(cluster: Cluster) -> None:
    stack, url = cluster
    uid = await finished_request(stack)
    command = [sys.executable, "-m", "busllm.cli.main", "trace", f"cmpl-{uid}", "--bus", url, "--cluster", CLUSTER]
    done = await anyio.run_process(command, check=False)
    assert (done.returncode, done.stdout.decode().splitlines()[0]) == (0, uid)


def test_a_word_that_is_no_uid_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("trace", "abort"):
        with pytest.raises(SystemExit) as ended:
            main([command, "not-a-uid"])
        assert ended.value.code == 2
        assert "no uid" in capsys.readouterr().err


def test_a_cluster_on_a_memory_bus_cannot_be_watched_from_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = tmp_path / "memory.toml"
    topology.write_text('[bus]\nkind = "memory"\n')
    for command in (["trace"], ["top"], ["abort", new_uid()]):
        assert main([*command, "--topology", str(topology)]) == 2
        assert "memory bus" in capsys.readouterr().err


# ------------------------------------------------------------ the view


def event(stage: str, name: str, elapsed_ms: float, index: int = 0, uid: str = "u", **data: object) -> TraceEvent:
    instance = f"{stage}-{index}-aaaaaaaa"
    return TraceEvent(uid, stage, instance, name, f"2026-01-01T00:00:{index:02}.000Z", elapsed_ms, dict(data))


def test_a_duration_is_counted_from_the_event_before_at_the_same_instance() -> None:
    rows = rows_of(
        [
            event("scheduler", "queued", 100.0),
            event("scheduler", "admitted", 130.0),
            event("frontend", "received", 1.0),
            event("frontend", "first_text", 5.0),
        ]
    )
    assert [(row.event.event, row.took_ms) for row in rows] == [
        ("received", 1.0),
        ("first_text", 4.0),
        ("queued", 100.0),
        ("admitted", 30.0),
    ]


def test_the_choices_of_a_request_are_timed_each_for_itself() -> None:
    rows = rows_of(
        [
            event("scheduler", "queued", 10.0, choice=0),
            event("scheduler", "queued", 20.0, choice=1),
            event("scheduler", "finished", 50.0, choice=0),
            event("scheduler", "finished", 90.0, choice=1),
        ]
    )
    assert [row.took_ms for row in rows] == [10.0, 20.0, 40.0, 70.0]


@pytest.mark.parametrize("width", [None, 80, 200])
def test_a_timeline_can_be_drawn_at_any_width_and_without_any_time(width: int | None) -> None:
    assert timeline(rows_of([event("frontend", "received", 0.0)]), width).row_count == 1


def test_a_summary_knows_how_a_request_ended_and_what_it_counted() -> None:
    events = [
        event("frontend", "received", 0.1, uid="a"),
        event("tokenizer", "tokenized", 1.0, uid="a", prompt_tokens=7),
        event("scheduler", "admitted", 1.0, uid="a", cached_tokens=3),
        event("frontend", "failed", 9.0, uid="a", code="queue_full"),
        event("frontend", "received", 0.1, index=1, uid="b"),
        event("detokenizer", "finished", 4.0, uid="c", tokens=2),
        event("detokenizer", "finished", 4.0, uid="c", tokens=3),
    ]
    old, failed, running = summaries(events, 10)
    assert (old.uid, old.output_tokens, old.total_ms) == ("c", 5, None)
    assert (failed.end, failed.total_ms, failed.prompt_tokens, failed.cached_tokens) == (
        "failed (queue_full)",
        9.0,
        7,
        3,
    )
    assert (running.uid, running.end) == ("b", "running")
