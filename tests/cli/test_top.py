"""`busllm top`: the table and its rates."""

from __future__ import annotations

import pytest
from rich.table import Table

from busllm.cli.terminal import console
from busllm.cli.top import Rates, Stage, show_once, table_of
from busllm.client import Client
from busllm.messages.control import Announcement, StageState
from busllm.testing.stack import Stack, request

Cluster = tuple[Stack, str]


def announced(kind: str, tokens: object, **fields: object) -> Announcement:
    statistics = {"tokens": tokens, **fields}
    return Announcement(kind, 0, f"{kind}-0-aaaaaaaa", "host", 7, StageState.READY, statistics=statistics)


def text_of(table: Table) -> list[str]:
    out = console()
    with out.capture() as capture:
        out.print(table)
    return capture.get().splitlines()


@pytest.mark.anyio
async def test_one_table_has_every_stage_and_the_schedulers_rate(
    cluster: Cluster, operator: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    stack, _ = cluster
    live = stack.owner.submit(request("busy", max_tokens=50_000))
    await stack.wait_for(lambda: live.has_text)
    assert await show_once(operator) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0].split("-")[0]: line.split() for line in lines}
    assert list(rows) == ["client", "tokenizer", "scheduler", "detokenizer"]
    assert header.split()[:4] == ["stage", "state", "host", "pid"]
    assert rows["scheduler"][5:7] == ["1", "0"]
    assert float(rows["scheduler"][-2]) > 0
    stack.owner.abort(live.uid)


def test_a_rate_needs_two_announcements_and_counts_between_their_arrivals() -> None:
    rates, first = Rates(), announced("scheduler", {"output": 100})
    rates.look([first], 10.0)
    rates.look([first], 10.4)
    assert rates.of(first.instance) is None
    rates.look([announced("scheduler", {"output": 150})], 10.5)
    assert rates.of(first.instance) == pytest.approx(100.0)


def test_a_rate_forgets_what_is_long_ago() -> None:
    rates = Rates()
    for second in range(10):
        rates.look([announced("detokenizer", 1000 if second else 0)], float(second))
    assert rates.of("detokenizer-0-aaaaaaaa") == 0.0


def test_what_a_stage_does_not_tell_is_a_dash_and_silence_is_shown() -> None:
    stages = [
        Stage(announced("scheduler", None, kv_pages="none of this form", running=2), is_silent=False),
        Stage(announced("frontend", None), is_silent=True),
    ]
    _, frontend, scheduler = text_of(table_of(stages, Rates()))
    assert frontend.split() == ["frontend-0-aaaaaaaa", "silent", "host", "7", *["-"] * 8]
    assert scheduler.split() == ["scheduler-0-aaaaaaaa", "ready", "host", "7", "-", "2", *["-"] * 6]


def test_the_forward_pass_is_shown() -> None:
    stage = Stage(announced("scheduler", None, attention="cpu (int4+int8)"), is_silent=False)
    header, scheduler = text_of(table_of([stage], Rates()))
    assert header.split()[-2:] == ["computed", "by"]
    assert scheduler.split()[-2:] == ["cpu", "(int4+int8)"]


@pytest.mark.anyio
async def test_a_stage_that_dies_without_a_word_is_called_silent(cluster: Cluster, operator: Client) -> None:
    stack, _ = cluster
    instance = stack.actors["tokenizer:0"].instance
    assert not operator.is_silent(instance)
    await stack.kill("tokenizer:0")
    await stack.wait_for(lambda: operator.is_silent(instance))
