"""How a cluster starts and ends: drains, hurries, kills of the parent, taken places, a bus that is not there."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import httpx
import nats
import pytest

from busllm.bus.nats_server import find_nats_server
from tests.end_to_end.cluster import BUSLLM, Cluster
from tests.end_to_end.null_cluster import Streams, announced, null_cluster, null_topology
from tests.end_to_end.processes import descendants, eventually, free_port, still_alive

pytestmark = pytest.mark.anyio

SOON_S = 2.0
HTTP_LIVES_S = 20.0

Make = Callable[..., Cluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes clusters that are killed at the end, whatever happens."""
    made: list[Cluster] = []

    def start(topology: str = "", *, wait: bool = True) -> Cluster:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        if wait:
            made.append(null_cluster(directory, topology or null_topology()))
        else:
            made.append(Cluster(directory, topology))
        return made[-1]

    yield start
    for cluster in made:
        cluster.kill()


def run(cluster: Cluster, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another `busllm` command in the place of a cluster, read to its end."""
    return subprocess.run(
        [*BUSLLM, *words, "--topology", str(cluster.file)],
        env={**os.environ, "XDG_STATE_HOME": str(cluster.directory), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


async def test_a_drain_lets_streams_finish_and_refuses_new_requests(make: Make) -> None:
    cluster = make()
    (up,) = cluster.started
    async with cluster.client() as client, cluster.http() as http:
        streams = Streams(client)
        async with anyio.create_task_group() as tasks:
            streams.start(tasks)
            await streams.all_in_mid_stream()
            up.send_signal(signal.SIGTERM)

            async def refuses() -> bool:
                answer = await http.post("/v1/completions", json={"model": "null", "prompt": "late"})
                return answer.status_code == 503 and "retry-after" in answer.headers

            await eventually(refuses, "new requests are refused")
        streams.check_undisturbed()
    assert cluster.stop() == [0]


async def test_streams_that_outlast_the_drain_end_with_a_typed_error(make: Make) -> None:
    cluster = make(null_topology(frontend="drain_timeout_s = 1\n"))
    async with cluster.client() as client:
        streams = Streams(client, num_tokens=7000)
        async with anyio.create_task_group() as tasks:
            streams.start(tasks)
            await streams.all_in_mid_stream()
            cluster.started[0].send_signal(signal.SIGTERM)
    assert {error.code for error in streams.errors.values()} == {"draining"}
    assert len(streams.errors) == len(streams.texts)
    assert cluster.stop() == [0]


@pytest.mark.slow
async def test_a_second_signal_hurries_the_drain(make: Make) -> None:
    cluster = make()
    (up,) = cluster.started
    async with cluster.client() as client:
        streams = Streams(client, num_tokens=7000)
        async with anyio.create_task_group() as tasks:
            streams.start(tasks)
            await streams.all_in_mid_stream()
            up.send_signal(signal.SIGTERM)
            await eventually(lambda: is_draining(cluster), "the drain has begun")
            began = time.monotonic()
            up.send_signal(signal.SIGTERM)
    assert cluster.stop() == [0]
    assert time.monotonic() - began < 10.0
    assert len(streams.errors) == len(streams.texts)


async def is_draining(cluster: Cluster) -> bool:
    async with cluster.http() as http:
        return (await http.get("/ready")).json().get("error", {}).get("code") == "draining"


async def test_nothing_is_left_when_up_is_killed(make: Make) -> None:
    cluster = make()
    (up,) = cluster.started
    everything = descendants(up.pid)
    assert cluster.bus_server_pid() in everything
    assert len(everything) >= 5
    up.kill()
    assert not still_alive(everything, within_s=SOON_S)


def test_a_taken_port_is_refused_at_once(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = make(null_topology(frontend=f"listen = '127.0.0.1:{port}'\n"), wait=False)
        began = time.monotonic()
        refused = run(cluster, "up")
    assert refused.returncode == 1
    assert str(port) in refused.stderr
    assert time.monotonic() - began < 2 * SOON_S  # most of it is the interpreter's own start


@pytest.mark.slow
def test_a_second_up_names_the_first_and_does_not_disturb_it(make: Make) -> None:
    cluster = make()
    refused = run(cluster, "up")
    assert refused.returncode == 2
    assert str(cluster.started[0].pid) in refused.stderr
    assert httpx.get(cluster.url + "/ready").status_code == 200
    assert cluster.stop() == [0]


async def test_a_stage_ends_when_a_live_older_one_has_its_place(make: Make) -> None:
    cluster = make()
    before = await announced(cluster)
    assert cluster.bus_url is not None
    second = run(cluster, "stage", "detokenizer", "--index", "0", BUSLLM_BUS_URL=cluster.bus_url)
    assert second.returncode == 3, second.stderr
    assert before["detokenizer:0"].instance in second.stderr
    assert (await announced(cluster))["detokenizer:0"].instance == before["detokenizer:0"].instance


async def test_a_bus_that_is_absent_at_start_is_waited_for(make: Make, tmp_path: Path) -> None:
    port = free_port()
    cluster = make(null_topology(more=f"bus.url = 'nats://secret@127.0.0.1:{port}'\n"), wait=False)
    cluster.start("up")

    async def says_why() -> bool:
        async with cluster.http() as http:
            try:
                answer = await http.get("/ready")
            except httpx.TransportError:
                return False  # the frontend's process is starting
            assert answer.status_code == 503
            refused = await http.post("/v1/completions", json={"model": "null", "prompt": "early"})
            assert refused.status_code == 503
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/metrics")).status_code == 200
            return "starting" in answer.json()["error"]["message"]

    await eventually(says_why, "HTTP says what is missing", HTTP_LIVES_S)
    config = tmp_path / "nats-server.conf"
    config.write_text(f'listen: "127.0.0.1:{port}"\nauthorization {{ token: "secret" }}\n')
    bus_server = cluster.start_command([str(find_nats_server()), "--config", str(config)])
    cluster.wait_until_ready()
    assert "secret@" not in cluster.log.read_text()
    cluster.started.remove(bus_server)  # the bus goes last
    assert cluster.stop() == [0]
    bus_server.terminate()
    bus_server.wait(10)


@pytest.mark.slow
async def test_a_bus_that_is_away_is_told_to_clients_and_comes_back(make: Make, tmp_path: Path) -> None:
    port = free_port()
    command = [str(find_nats_server()), "--addr", "127.0.0.1", "--port", str(port)]
    cluster = make(null_topology(more=f"bus.url = 'nats://127.0.0.1:{port}'\n"), wait=False)
    bus_server = cluster.start_command(command)
    cluster.start("up")
    cluster.wait_until_ready()
    bus_server.kill()
    bus_server.wait(10)
    async with cluster.http() as http:

        async def is_away() -> bool:
            answer = await http.post("/v1/completions", json={"model": "null", "prompt": "lost"})
            return answer.status_code == 503 and answer.json()["error"]["code"] == "bus_unavailable"

        await eventually(is_away, "new requests are refused", within_s=5.0)
        cluster.started.remove(bus_server)
        cluster.start_command(command)
        cluster.wait_until_ready(within_s=10.0)
        answer = await http.post("/v1/completions", json={"model": "null", "prompt": "found", "max_tokens": 3})
        assert answer.status_code == 200


@pytest.mark.slow
async def test_stages_without_a_supervisor_drop_the_requests_of_a_killed_frontend(make: Make, tmp_path: Path) -> None:
    """Nobody says that it is gone: the others notice its silence."""
    port, http_port = free_port(), free_port()
    more = f"bus.url = 'nats://127.0.0.1:{port}'\n"
    cluster = make(null_topology(more=more, frontend=f"listen = '127.0.0.1:{http_port}'\n"), wait=False)
    cluster.use(http=f"http://127.0.0.1:{http_port}", bus=f"nats://127.0.0.1:{port}")
    cluster.start_command([str(find_nats_server()), "--addr", "127.0.0.1", "--port", str(port)])
    for kind in ("tokenizer", "detokenizer", "scheduler"):
        cluster.start("stage", kind)
    frontend = cluster.start("stage", "frontend")
    cluster.wait_until_ready()
    watcher = await nats.connect(cluster.bus_url)
    sequences: dict[str, dict[str, float]] = {}

    async def hear(message: nats.aio.msg.Msg) -> None:
        announcement = json.loads(message.data)
        sequences[announcement["kind"]] = announcement["statistics"]

    await watcher.subscribe("busllm.local.stage.>", cb=hear)
    async with cluster.client() as client:
        streams = Streams(client, num_tokens=8000)
        async with anyio.create_task_group() as tasks:
            streams.start(tasks)
            await streams.all_in_mid_stream()
            await eventually(lambda: holds(sequences, 8), "both hold eight sequences")
            frontend.kill()
    await eventually(lambda: holds(sequences, 0), "nobody holds a sequence", within_s=9.0)
    await watcher.close()
    frontend.wait(10)
    cluster.started.remove(frontend)


async def holds(sequences: dict[str, dict[str, float]], number: int) -> bool:
    at_scheduler = sequences.get("scheduler", {}).get("sequences")
    return at_scheduler == sequences.get("detokenizer", {}).get("open_sequences") == number
