"""Two ranks of a tiny model as real processes: the text of one rank, whatever happens to a rank or to the bus."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from openai import AsyncOpenAI

import busllm
from busllm.testing.tiny_model import write_tiny_model
from tests.end_to_end.cluster import Cluster
from tests.end_to_end.null_cluster import announced, null_cluster
from tests.end_to_end.processes import eventually

pytestmark = pytest.mark.anyio

PROMPTS = [f"{number} bottles of beer on the wall" for number in range(6)]
NUM_TOKENS = 400
TOPOLOGY = """
model = {{ source = "{directory}", name = "tiny", dtype = "float32" }}
frontend.listen = "127.0.0.1:0"
scheduler = {{ tensor_parallel = 2, attention = "torch", kv_tokens = 8192 }}
"""
RANKS = ("scheduler:0", "rank:1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=2)


@pytest.fixture(scope="module")
def of_one_rank(model: Path) -> dict[str, str]:
    """What the whole model answers in one process."""
    sampling = busllm.SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, seed=7, ignore_eos=True)
    with busllm.LLM(str(model), dtype="float32", attention="torch") as llm:
        answers = llm.generate(PROMPTS, sampling)
    return dict(zip(PROMPTS, (answer.text for answer in answers), strict=True))


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = null_cluster(tmp_path_factory.mktemp("cluster"), TOPOLOGY.format(directory=model))
    try:
        yield started
        assert started.stop() == [0]
    finally:
        started.kill()


@asynccontextmanager
async def streaming(cluster: Cluster, expected: dict[str, str]) -> AsyncIterator[None]:
    """Streams that are in their middle when the block begins, and end with the expected texts."""
    texts = dict.fromkeys(PROMPTS, "")

    async def read(client: AsyncOpenAI, prompt: str) -> None:
        stream = await client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=NUM_TOKENS,
            temperature=0.8,
            seed=7,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            texts[prompt] += chunk.choices[0].text

    async def all_have_begun() -> bool:
        return all(texts.values())

    async with cluster.client() as client, anyio.create_task_group() as tasks:
        for prompt in PROMPTS:
            tasks.start_soon(read, client, prompt)
        await eventually(all_have_begun, "all streams have begun")
        yield
    assert texts == expected, cluster.tail()


async def test_the_texts_are_those_of_one_rank(cluster: Cluster, of_one_rank: dict[str, str]) -> None:
    async with streaming(cluster, of_one_rank):
        pass
    await cluster.idle()
    stages = await announced(cluster)
    assert stages["scheduler:0"].statistics["steps"] == stages["rank:1"].statistics["steps"]
    assert stages["rank:1"].statistics["leader"] == stages["scheduler:0"].instance


@pytest.mark.parametrize("outage_s", [0.2, pytest.param(3.0, marks=pytest.mark.slow)])
async def test_a_gap_on_the_bus_ends_no_rank(cluster: Cluster, of_one_rank: dict[str, str], outage_s: float) -> None:
    before = await announced(cluster)
    async with streaming(cluster, of_one_rank):
        bus_server = cluster.bus_server_pid()
        os.kill(bus_server, signal.SIGSTOP)
        try:
            await anyio.sleep(outage_s)  # the outage itself
        finally:
            os.kill(bus_server, signal.SIGCONT)
    after = await announced(cluster)
    assert [after[name].instance for name in RANKS] == [before[name].instance for name in RANKS]


@pytest.mark.slow
async def test_a_killed_bus_server_ends_no_rank(cluster: Cluster, of_one_rank: dict[str, str]) -> None:
    before = await announced(cluster)
    async with streaming(cluster, of_one_rank):
        os.kill(cluster.bus_server_pid(), signal.SIGKILL)
    after = await announced(cluster)
    assert [after[name].instance for name in RANKS] == [before[name].instance for name in RANKS]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", RANKS)
async def test_a_lost_rank_takes_its_replica_down_and_both_come_back(
    cluster: Cluster, of_one_rank: dict[str, str], name: str, number: signal.Signals
) -> None:
    before = await announced(cluster)
    said_before = cluster.log.read_text().count('"event": "failed"')
    async with streaming(cluster, of_one_rank):
        os.kill(before[name].pid, number)
    await cluster.idle()
    after = await announced(cluster)
    assert all(after[rank].pid != before[rank].pid for rank in RANKS)
    said = [line for line in cluster.log.read_text().splitlines() if '"event": "failed"' in line][said_before:]
    assert len(said) == 1, said  # the lost one says nothing, the other why it ends
    assert before[name].instance in said[0] or "another rank is gone or frozen" in said[0]
    if number is signal.SIGSTOP:  # `up` does not wait for the usual 10 s of silence
        assert '"silent_s": 2.0' in cluster.log.read_text()
