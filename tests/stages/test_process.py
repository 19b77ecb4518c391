"""One stage in a process of its own, as systemd runs it, and the signals that end it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.abc
import pytest

from busllm.bus.nats import NatsBus
from busllm.bus.nats_options import NatsOptions
from busllm.bus.nats_server import EmbeddedNatsServer, NatsServerOptions
from busllm.bus.protocol import Connection, Message
from busllm.bus.subjects import Subjects
from busllm.messages.codec import encode, pack_ids
from busllm.messages.control import Announcement, StageState, announcement_decoder
from busllm.messages.to_frontend import Taken
from busllm.messages.to_frontend import decoder as to_frontend
from busllm.messages.to_scheduler import ChoiceStart, Generate
from busllm.sampling import SamplingParams

pytestmark = pytest.mark.anyio

SUBJECTS = Subjects("local")
FRONTEND = "frontend-0-aaaaaaaa"
TOPOLOGY = "model.source = 'null'\n[frontend]\ndrain_timeout_s = 60\n"
PATIENCE_S = 30.0
HURRIED_S = 2.5


@pytest.fixture
async def bus_url(tmp_path: Path) -> AsyncIterator[str]:
    server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=tmp_path))
    await server.start()
    yield server.url
    await server.stop()


@pytest.fixture
async def connection(bus_url: str) -> AsyncIterator[Connection]:
    """Somebody who hears what stages announce and what they tell a frontend that is not there."""
    connection = await NatsBus(NatsOptions(urls=(bus_url,))).connect(name="test", inbox="inbox.test")
    await connection.subscribe(SUBJECTS.stage("*", "*"))
    await connection.subscribe(SUBJECTS.reply(FRONTEND, "*"))
    yield connection
    await connection.close()


async def heard(connection: Connection, state: StageState) -> Announcement:
    """Waits until a stage says that it is in a state."""
    while True:
        for item in await connection.receive():
            if isinstance(item, Message) and ".stage." in item.subject:
                announcement = announcement_decoder.decode(item.payload)
                if announcement.state is state:
                    return announcement


async def taken(connection: Connection) -> Taken:
    """Waits until a stage says that it has taken a request."""
    while True:
        for item in await connection.receive():
            if isinstance(item, Message) and ".reply." in item.subject:
                reply = to_frontend.decode(item.payload)
                assert isinstance(reply, Taken), reply
                return reply


@pytest.fixture
async def scheduler(tmp_path: Path, bus_url: str) -> AsyncIterator[anyio.abc.Process]:
    topology = tmp_path / "topology.toml"
    topology.write_text(TOPOLOGY)
    command = [sys.executable, "-m", "busllm.cli.main", "stage", "scheduler", "--topology", str(topology)]
    environment = os.environ | {"BUSLLM_BUS_URL": bus_url}
    process = await anyio.open_process(command, env=environment, stdout=None, stderr=None)
    yield process
    if process.returncode is None:
        process.kill()
    await process.aclose()


async def test_a_second_signal_ends_a_drain_that_waits_for_a_request(
    scheduler: anyio.abc.Process, connection: Connection
) -> None:
    with anyio.fail_after(PATIENCE_S):
        ready = await heard(connection, StageState.READY)
        params = SamplingParams(max_tokens=5)  # without a detokenizer they wait for ever
        generate = Generate("u" * 20, 1, FRONTEND, pack_ids([1, 2, 3]), (ChoiceStart(0),), params, seed=1)
        connection.publish(SUBJECTS.generate(ready.instance, generate.uid), encode(generate))
        assert (await taken(connection)).instance == ready.instance
        scheduler.send_signal(signal.SIGTERM)
        await heard(connection, StageState.DRAINING)
    scheduler.send_signal(signal.SIGTERM)
    with anyio.fail_after(HURRIED_S):
        assert await scheduler.wait() == 0
        await heard(connection, StageState.GONE)


async def test_what_loading_made_is_left_out_of_garbage_collection(
    tmp_path: Path, bus_url: str, connection: Connection
) -> None:
    program = """
import gc, sys
from busllm.stages.process import run_stages
from busllm.topology.placement import StageId
from busllm.topology.read import load_topology
file, url = sys.argv[1:]
run_stages(load_topology(file), [StageId("detokenizer", 0)], bus_url=url, listen_fds={}, topology_file=file)
print(gc.get_freeze_count() > 10_000)
"""
    topology = tmp_path / "topology.toml"
    topology.write_text(TOPOLOGY)
    with anyio.fail_after(PATIENCE_S):
        async with await anyio.open_process([sys.executable, "-c", program, str(topology), bus_url]) as process:
            await heard(connection, StageState.READY)
            process.send_signal(signal.SIGTERM)
            assert process.stdout is not None
            said = b"".join([part async for part in process.stdout])
            assert await process.wait() == 0
    assert said.endswith(b"True\n")


async def test_ranks_in_one_process_end_without_an_error(tmp_path: Path) -> None:
    topology = tmp_path / "topology.toml"
    topology.write_text("bus.kind = 'memory'\nmodel.source = 'null'\nscheduler.tensor_parallel = 2\n")
    stages = ("tokenizer", "scheduler:0", "scheduler:0.1", "detokenizer")
    command = [sys.executable, "-m", "busllm.cli.main", "stage", *stages, "--topology", str(topology)]
    with anyio.fail_after(PATIENCE_S):
        process = await anyio.open_process(command, stdout=None)
        assert process.stderr is not None
        log, signalled = "", False
        async for text in process.stderr:
            log += text.decode()
            if not signalled and log.count('"event": "ready"') == len(stages):
                signalled = True
                process.terminate()
        assert await process.wait() == 0
    assert signalled
    assert '"level": "error"' not in log
