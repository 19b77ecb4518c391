"""What a message costs on a bus, by the number of subscriptions and of stages.

Owns: publishing and receiving on the memory bus and on a NATS server of its own.
Does not know: what stages say to each other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio

from bench.compare.process_tree import cpu_s
from bench.scaling.figure import Figure, curves
from busllm.bus.memory import MemoryBus
from busllm.bus.nats import NatsBus
from busllm.bus.nats_options import NatsOptions
from busllm.bus.nats_server import EmbeddedNatsServer, NatsServerOptions
from busllm.bus.protocol import Bus, Connection

SUBSCRIPTIONS = (10, 100, 1_000)
STAGES = (10, 30, 100)
BURST = 100  # messages published before the first is received, as in a busy turn of an event loop
NUM_MESSAGES = 20_000  # received in all: a server's CPU time is told in steps of 10 ms
PAYLOAD = bytes(200)
_CONNECTIONS = 10

ServerBusy = Callable[[], float]


def figures() -> Iterator[Figure]:
    """To one receiver beside many subscriptions, and to all stages at once."""
    sides = ("memory: both ends and the routing", "NATS: both ends", "NATS: server")
    yield Figure(
        name="bus_subscriptions",
        title="One message to one receiver, beside other subscriptions",
        x_label="subscriptions of others, each to a subject of its own",
        y_label="µs of CPU time per message",
        curves=curves(sides, SUBSCRIPTIONS, lambda number: anyio.run(_one_to_one, number)),
    )
    yield Figure(
        name="bus_stages",
        title="One heartbeat that all stages hear",
        x_label="stages",
        y_label="µs of CPU time per stage that hears it",
        curves=curves(sides, STAGES, lambda number: anyio.run(_one_to_all, number)),
    )


@asynccontextmanager
async def _nats() -> AsyncIterator[tuple[Bus, ServerBusy]]:
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=Path(directory)))
        await server.start()
        try:
            assert server.pid is not None
            pid = server.pid
            yield NatsBus(NatsOptions(urls=(server.url,))), lambda: cpu_s(pid)
        finally:
            await server.stop()


async def _connect(bus: Bus, name: str, stack: AsyncExitStack) -> Connection:
    connection = await bus.connect(name=name, inbox=f"bench.inbox.{name}")
    stack.push_async_callback(connection.close)
    return connection


# ---------------------------------------------------------------- one receiver


async def _one_to_one(num_others: int) -> tuple[float, float, float]:
    memory_us, _ = await _to_one_us(MemoryBus(), lambda: 0.0, num_others)
    async with _nats() as (bus, server_busy):
        return memory_us, *await _to_one_us(bus, server_busy, num_others)


async def _to_one_us(bus: Bus, server_busy: ServerBusy, num_others: int) -> tuple[float, float]:
    """Microseconds per message: of this process, of the server."""
    async with AsyncExitStack() as stack:
        others = [await _connect(bus, f"other-{number}", stack) for number in range(_CONNECTIONS)]
        for number in range(num_others):
            await others[number % _CONNECTIONS].subscribe(f"bench.generate.scheduler-{number}.*")
        receiver = await _connect(bus, "receiver", stack)
        await receiver.subscribe("bench.generate.receiver.*")
        sender = await _connect(bus, "sender", stack)
        began_s, server_began_s = time.thread_time(), server_busy()
        for first in range(0, NUM_MESSAGES, BURST):
            for number in range(first, first + BURST):
                sender.publish(f"bench.generate.receiver.{number:020}", PAYLOAD)
            await _receive(receiver, BURST)
        busy_s, server_s = time.thread_time() - began_s, server_busy() - server_began_s
    return busy_s / NUM_MESSAGES * 1e6, server_s / NUM_MESSAGES * 1e6


async def _receive(connection: Connection, num_messages: int) -> None:
    while num_messages > 0:
        num_messages -= len(await connection.receive())


# ---------------------------------------------------------------- all stages


async def _one_to_all(num_stages: int) -> tuple[float, float, float]:
    memory_us, _ = await _to_all_us(MemoryBus(), lambda: 0.0, num_stages)
    async with _nats() as (bus, server_busy):
        return memory_us, *await _to_all_us(bus, server_busy, num_stages)


async def _to_all_us(bus: Bus, server_busy: ServerBusy, num_stages: int) -> tuple[float, float]:
    """Microseconds per receiver: of this process, of the server."""
    async with AsyncExitStack() as stack:
        stages = [await _connect(bus, f"stage-{number}", stack) for number in range(num_stages)]
        for number, stage in enumerate(stages):
            for pattern in ("bench.stage.*.*", "bench.abort.*", f"bench.control.{number}.*", f"bench.work.{number}.*"):
                await stage.subscribe(pattern)
        began_s, server_began_s = time.thread_time(), server_busy()
        num_heartbeats = NUM_MESSAGES // num_stages
        for number in range(num_heartbeats):
            stages[number % num_stages].publish(f"bench.stage.scheduler.{number % num_stages}", PAYLOAD)
            for stage in stages:
                await _receive(stage, 1)
        busy_s, server_s = time.thread_time() - began_s, server_busy() - server_began_s
    num_heard = num_heartbeats * num_stages
    return busy_s / num_heard * 1e6, server_s / num_heard * 1e6
