"""The programs of docs/guide/bus.md do what the page says."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from busllm.client import Client
from busllm.errors import Aborted
from busllm.testing.nats_stack import running_nats_stack
from busllm.testing.stack import Stack, StackConfig, request
from tests.docs.pages import DOCS, blocks, read

PAGE = DOCS / "guide" / "bus.md"
PATIENCE_S = 30.0
WATCHER, CLIENT = (block.code for block in blocks(PAGE, "python"))


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[tuple[Stack, str]]:
    """A cluster of the name that the page uses."""
    with anyio.fail_after(PATIENCE_S):
        async with running_nats_stack(tmp_path, StackConfig(cluster="local", step_time_s=0.002)) as running:
            yield running


@pytest.mark.anyio
async def test_ten_lines_of_nats_py_end_what_they_watch_for(local: tuple[Stack, str]) -> None:
    stack, url = local
    watcher = await anyio.open_process([sys.executable, "-c", WATCHER], env=os.environ | {"NATS_URL": url})
    async with watcher:
        assert watcher.stdout is not None
        while True:  # until the watcher has subscribed, which it does not tell
            live = stack.owner.submit(request("x" * 1001, max_tokens=200))
            try:
                async for _ in live:
                    pass
            except Aborted:
                break
        assert (await watcher.stdout.receive()).decode().splitlines()[0] == f"ended {live.uid}"
        assert len(await stack.generate("short", max_tokens=50)) == 50
        watcher.terminate()


@pytest.mark.anyio
async def test_the_program_with_a_client_prints_an_answer_and_its_trace(local: tuple[Stack, str]) -> None:
    done = await anyio.run_process([sys.executable, "-c", CLIENT], env=os.environ | {"NATS_URL": local[1]}, check=False)
    assert done.returncode == 0, done.stderr.decode()
    answer, *events = done.stdout.decode().splitlines()
    assert len(answer) == 40
    assert {event.split()[1] for event in events} >= {"received", "tokenized", "admitted", "first_token", "finished"}
    assert done.stderr == b""


def test_every_call_that_the_page_names_exists() -> None:
    named = set(re.findall(r"client\.(\w+)\(", read("guide/bus.md")))
    public = {name for name in vars(Client) if not name.startswith("_")} - {"instance", "is_silent"}
    assert named == public
