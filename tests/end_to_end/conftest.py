"""Clusters of real processes around the default model, and around the null engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from busllm.bus.nats_server import find_nats_server
from busllm.errors import ModelError
from busllm.model_store.pull import pull
from busllm.model_store.resolve import resolve
from tests.end_to_end.cluster import Cluster
from tests.end_to_end.processes import free_port

MODEL = "smollm2-135m"
STAGES = ("frontend", "tokenizer", "scheduler", "detokenizer")
MAX_QUEUED = 40
MAX_BODY_BYTES = 262_144

# The bus carries 16 KiB, so that the longest prompts travel in parts everywhere.
COMMON = f"""
[frontend]
listen = "{{listen}}"
max_queued = {MAX_QUEUED}
max_body_bytes = {MAX_BODY_BYTES}
[scheduler]
kv_tokens = 32768
[bus]
max_payload_bytes = 16384
"""
IN_ONE_PROCESS = f"[[process]]\nstages = {list(STAGES)}\n"


def up(directory: Path, text: str) -> Cluster:
    """Starts `busllm up`."""
    cluster = Cluster(directory, text)
    cluster.start("up")
    return cluster


def in_one_process_over_memory(directory: Path) -> Cluster:
    return up(directory, COMMON.format(listen="127.0.0.1:0") + 'kind = "memory"\n')


def in_one_process_over_nats(directory: Path) -> Cluster:
    return up(directory, COMMON.format(listen="127.0.0.1:0") + IN_ONE_PROCESS)


def the_default(directory: Path) -> Cluster:
    return up(directory, COMMON.format(listen="127.0.0.1:0"))


def each_stage_by_hand(directory: Path) -> Cluster:
    listen, bus = f"127.0.0.1:{free_port()}", f"nats://127.0.0.1:{free_port()}"
    cluster = Cluster(directory, COMMON.format(listen=listen) + f'url = "{bus}"\n')
    config = directory / "nats-server.conf"
    config.write_text(f"listen: {bus.removeprefix('nats://')}\nmax_payload: 16384\n")
    cluster.use(http=f"http://{listen}", bus=bus)
    cluster.start_command([str(find_nats_server()), "--config", str(config)])
    for kind in reversed(STAGES):
        cluster.start("stage", kind)
    return cluster


NATS_SERVER_ENDED_BY_SIGTERM = 1

TOPOLOGIES: tuple[Callable[[Path], Cluster], ...] = (
    the_default,
    in_one_process_over_memory,
    in_one_process_over_nats,
    each_stage_by_hand,
)


@pytest.fixture(scope="session")
def model() -> str:
    """The default model, fetched unless it is here."""
    try:
        resolve(MODEL)
    except ModelError:
        pull(MODEL)
    return MODEL


@pytest.fixture(scope="session", params=TOPOLOGIES, ids=lambda make: make.__name__.replace("_", " "))
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    """The default model behind HTTP, the same on every topology; it drains cleanly at the end."""
    started: Cluster = request.param(tmp_path_factory.mktemp("cluster"))
    try:
        started.seconds_to_ready = started.wait_until_ready()
        yield started
        statuses = started.stop()
        assert set(statuses) <= {0, NATS_SERVER_ENDED_BY_SIGTERM}, (statuses, started.tail())
    finally:
        started.kill()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    """The stock client of the cluster."""
    async with cluster.client() as connected:
        yield connected


@pytest.fixture(scope="session")
def solo_answers() -> dict[str, str]:
    """Greedy answers given alone, by the first topology that was asked; every other must say the same."""
    return {}
