"""`busllm abort`: what it says of running, ended and unknown requests."""

from __future__ import annotations

import sys

import anyio
import pytest

from busllm.cli.abort import abort_all
from busllm.cli.bus_client import uid
from busllm.client import Client
from busllm.errors import Aborted
from busllm.ids import new_uid
from busllm.testing.stack import Stack, request
from tests.cli.conftest import CLUSTER
from tests.cli.test_trace import finished_request

Cluster = tuple[Stack, str]


@pytest.mark.anyio
async def test_a_running_request_is_ended_and_the_line_says_where_it_was(
    cluster: Cluster, operator: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    stack, _ = cluster
    live = stack.owner.submit(request("long", max_tokens=50_000))
    await stack.wait_for(lambda: live.has_text)
    assert await abort_all(operator, [live.uid]) == 0
    with pytest.raises(Aborted):
        async for _ in live:
            pass
    said = capsys.readouterr().out
    assert f"{live.uid}: aborted" in said
    assert f"running at {stack.actors['scheduler:0'].instance}" in said


@pytest.mark.anyio
async def test_a_request_that_has_ended_is_known_and_an_invented_one_is_not(
    cluster: Cluster, operator: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, invented = await finished_request(cluster[0]), new_uid()
    assert await abort_all(operator, [ended]) == 0
    assert f"{ended}: had ended before" in capsys.readouterr().out
    assert await abort_all(operator, [invented, ended]) == 1
    assert f"{invented}: unknown to every stage" in capsys.readouterr().err


@pytest.mark.anyio
async def test_the_command_ends_with_1_for_an_unknown_request(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "busllm.cli.main", "abort", new_uid(), "--bus", cluster[1], "--cluster", CLUSTER]
    done = await anyio.run_process(command, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"unknown to every stage" in done.stderr


def test_the_id_of_an_answers_body_is_taken_for_its_uid() -> None:
    bare = new_uid()
    assert uid(f"chatcmpl-{bare}") == uid(f"cmpl-{bare}") == uid(bare) == bare
