"""Fixtures that all tests share."""

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop that anyio's tests run on: nats-py and hypercorn need asyncio."""
    return "asyncio"
