"""A cluster around the null engine, on a NATS server of its own, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from busllm.client import Client, ClientOptions
from busllm.testing.nats_stack import running_nats_stack
from busllm.testing.stack import FAST_TIMINGS, Stack, StackConfig

PATIENCE_S = 30.0
CLUSTER = "test"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[Stack, str]]:
    """The stack and the URL of its bus."""
    with anyio.fail_after(PATIENCE_S):
        async with running_nats_stack(tmp_path, StackConfig(step_time_s=0.002, cluster=CLUSTER)) as running:
            yield running


@pytest.fixture
async def operator(cluster: tuple[Stack, str]) -> AsyncIterator[Client]:
    """A client beside the one that owns the requests, which is the stack's."""
    options = ClientOptions(timings=FAST_TIMINGS)
    async with Client(cluster[1], cluster=CLUSTER, options=options) as client:
        yield client
