"""Harnesses for the conformance suite; one real NATS server for all tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

pytest.register_assert_rewrite("busllm.testing")

from busllm.bus.nats_server import NatsServerOptions  # noqa: E402 - the rewriting comes before the import
from busllm.testing.nats_harness import NatsHarness, RefusingNatsServer  # noqa: E402


@pytest.fixture(scope="session")
async def nats_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RefusingNatsServer]:
    """A server on a free port."""
    server = RefusingNatsServer(NatsServerOptions(runtime_dir=tmp_path_factory.mktemp("nats")))
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def nats_harness(nats_server: RefusingNatsServer) -> AsyncIterator[NatsHarness]:
    """That server, for one test."""
    harness = NatsHarness(nats_server)
    yield harness
    await harness.close()
