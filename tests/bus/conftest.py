"""Harnesses for the conformance suite; each test has a real NATS server of its own, which starts in 15 ms."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("busllm.testing")

from busllm.bus.nats_server import NatsServerOptions  # noqa: E402 - the rewriting comes before the import
from busllm.testing.nats_harness import NatsHarness, RefusingNatsServer  # noqa: E402


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[RefusingNatsServer]:
    """A server on a free port."""
    server = RefusingNatsServer(NatsServerOptions(runtime_dir=tmp_path / "nats"))
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def nats_harness(nats_server: RefusingNatsServer) -> AsyncIterator[NatsHarness]:
    """That server, for one test."""
    harness = NatsHarness(nats_server)
    yield harness
    await harness.close()
