"""The whole path of a request around the null engine, on a bus that can be cut, in memory and over NATS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import pytest

from busllm.bus.nats import NatsBus
from busllm.bus.nats_options import NatsOptions
from busllm.bus.nats_server import EmbeddedNatsServer, NatsServerOptions
from busllm.bus.protocol import Bus
from busllm.testing.faulty_bus import FaultyBus
from busllm.testing.nats_harness import QUICK_RETRY
from busllm.testing.stack import Stack, StackConfig, running_stack


class World(Protocol):
    """A bus whose server can go away and come back."""

    bus: Bus

    async def cut(self) -> None: ...

    async def mend(self) -> None: ...

    def stack(self, config: StackConfig | None = None) -> AbstractAsyncContextManager[Stack]: ...


class _Stacks:
    bus: Bus

    def stack(self, config: StackConfig | None = None) -> AbstractAsyncContextManager[Stack]:
        return running_stack(self.bus, config)


class MemoryWorld(_Stacks):
    def __init__(self) -> None:
        self.bus: FaultyBus = FaultyBus()

    async def cut(self) -> None:
        self.bus.cut("the plug was pulled")

    async def mend(self) -> None:
        self.bus.mend()


class NatsWorld(_Stacks):
    def __init__(self, server: EmbeddedNatsServer) -> None:
        self._server = server
        self.bus = NatsBus(NatsOptions(urls=(server.url,), retry=QUICK_RETRY))

    async def cut(self) -> None:
        await self._server.stop()

    async def mend(self) -> None:
        await self._server.restart()


@pytest.fixture(params=["memory", "nats"])
async def world(request: pytest.FixtureRequest, tmp_path: object) -> AsyncIterator[World]:
    """A fresh bus for one test."""
    if request.param == "memory":
        yield MemoryWorld()
        return
    server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=tmp_path))  # type: ignore[arg-type]
    await server.start()
    try:
        yield NatsWorld(server)
    finally:
        await server.stop()
