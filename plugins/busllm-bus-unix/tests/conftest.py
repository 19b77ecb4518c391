"""The event loop of the tests."""

import pytest

pytest.register_assert_rewrite("busllm.testing")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
