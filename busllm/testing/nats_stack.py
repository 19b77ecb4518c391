"""The whole path of a request on a NATS server of its own, so that clients and commands can be tried on it.

Owns: the server's life around the stack's.
Does not know: the tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from busllm.bus.nats import NatsBus
from busllm.bus.nats_options import NatsOptions
from busllm.bus.nats_server import EmbeddedNatsServer, NatsServerOptions
from busllm.testing.nats_harness import QUICK_RETRY
from busllm.testing.stack import Stack, StackConfig, running_stack


@asynccontextmanager
async def running_nats_stack(directory: Path, config: StackConfig | None = None) -> AsyncIterator[tuple[Stack, str]]:
    """Runs a server and a stack until the block ends; gives the stack and the bus's URL with its token.

    Args:
        directory: for the server's files.
    """
    server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=directory))
    await server.start()
    try:
        bus = NatsBus(NatsOptions(urls=(server.url,), retry=QUICK_RETRY))
        async with running_stack(bus, config) as stack:
            yield stack, server.url
    finally:
        await server.stop()
