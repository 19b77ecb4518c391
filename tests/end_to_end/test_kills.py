"""Processes die or freeze in mid-stream. The null engine tells what every text must be."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator

import anyio
import pytest
from openai import AsyncOpenAI

from tests.end_to_end.cluster import Cluster
from tests.end_to_end.null_cluster import Streams, announced, null_cluster, null_topology, send_signal
from tests.end_to_end.processes import eventually

pytestmark = pytest.mark.anyio

LATER_STAGES = ("tokenizer:0", "scheduler:0", "detokenizer:0")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One stage of each kind."""
    yield from running(
        null_cluster(tmp_path_factory.mktemp("single"), null_topology(more="bus.max_payload_bytes = 4096\n"))
    )


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two of each kind that computes."""
    counts = {"tokenizer": 2, "scheduler": 2, "detokenizer": 2}
    yield from running(null_cluster(tmp_path_factory.mktemp("double"), null_topology(counts)))


def running(cluster: Cluster) -> Iterator[Cluster]:
    try:
        yield cluster
        assert cluster.stop() == [0]
    finally:
        cluster.kill()


@pytest.fixture
async def single_client(single: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with single.client() as client:
        yield client


@pytest.fixture
async def double_client(double: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with double.client() as client:
        yield client


@pytest.mark.parametrize("stage", LATER_STAGES)
async def test_a_killed_stage_is_not_noticed_in_the_text(
    single: Cluster, single_client: AsyncOpenAI, stage: str
) -> None:
    streams = Streams(single_client)
    before = (await announced(single))[stage]
    async with anyio.create_task_group() as tasks:
        streams.start(tasks)
        await streams.all_in_mid_stream()
        os.kill(before.pid, signal.SIGKILL)
    streams.check_undisturbed()
    await single.idle()
    assert (await announced(single))[stage].instance != before.instance


async def test_a_killed_bus_server_is_not_noticed_in_the_text(single: Cluster, single_client: AsyncOpenAI) -> None:
    streams = Streams(single_client)
    before = await announced(single)
    async with anyio.create_task_group() as tasks:
        streams.start(tasks)
        await streams.all_in_mid_stream()
        os.kill(single.bus_server_pid(), signal.SIGKILL)
    streams.check_undisturbed()
    await single.idle()
    after = await announced(single)
    assert {name: stage.pid for name, stage in after.items()} == {name: stage.pid for name, stage in before.items()}


@pytest.mark.slow
async def test_a_bus_server_that_is_frozen_for_a_second_is_not_noticed_in_the_text(
    single: Cluster, single_client: AsyncOpenAI
) -> None:
    streams = Streams(single_client)
    async with anyio.create_task_group() as tasks:
        streams.start(tasks)
        await streams.all_in_mid_stream()
        bus_server = single.bus_server_pid()
        os.kill(bus_server, signal.SIGSTOP)
        try:
            await anyio.sleep(1.0)  # the outage itself
        finally:
            os.kill(bus_server, signal.SIGCONT)
    streams.check_undisturbed()
    await single.idle()


async def test_requests_of_a_killed_frontend_are_dropped_everywhere(
    single: Cluster, single_client: AsyncOpenAI
) -> None:
    streams = Streams(single_client, num_tokens=7000)
    async with anyio.create_task_group() as tasks:
        streams.start(tasks)
        await streams.all_in_mid_stream()
        await send_signal(single, "frontend:0", signal.SIGKILL)
        await eventually(lambda: ended(streams), "every connection is broken")
    await single.idle(within_s=10.0)


async def ended(streams: Streams) -> bool:
    return len(streams.errors) == len(streams.texts)


@pytest.mark.parametrize("stage", ["scheduler:0", pytest.param("detokenizer:0", marks=pytest.mark.slow)])
async def test_a_frozen_stage_is_replaced_by_the_other_of_its_kind(
    double: Cluster, double_client: AsyncOpenAI, stage: str
) -> None:
    streams = Streams(double_client)
    pid = (await announced(double))[stage].pid
    async with anyio.create_task_group() as tasks:
        streams.start(tasks)
        await streams.all_in_mid_stream()
        os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)  # what it says late is ignored
    streams.check_undisturbed()
    await double.idle()


async def test_a_prompt_beyond_a_message_of_the_bus_travels_in_parts(
    single: Cluster, single_client: AsyncOpenAI
) -> None:
    answer = await single_client.completions.create(model="null", prompt="x" * 8000, max_tokens=5)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8000, 5)
