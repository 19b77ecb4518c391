"""Ends that are not the model's: the client leaves, an operator aborts. Every stage is at its baseline afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import nats
import pytest
from nats.aio.client import Client as NatsClient
from openai import APIError, APIStatusError, AsyncOpenAI

from tests.end_to_end.cluster import Cluster
from tests.end_to_end.conftest import MODEL

pytestmark = pytest.mark.anyio

LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count to a thousand."}],
    "max_tokens": 4000,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture
async def stock_nats(cluster: Cluster) -> AsyncIterator[NatsClient]:
    """A connection of a stock NATS client."""
    if cluster.bus_url is None:
        pytest.skip("a memory bus cannot be reached from outside")
    connection = await nats.connect(cluster.bus_url)
    yield connection
    await connection.close()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_client_that_leaves_frees_everything(cluster: Cluster, client: AsyncOpenAI, stream: bool) -> None:
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            answer = await client.chat.completions.create(stream=stream, **LONG)
            async for _ in answer:
                pass

        tasks.start_soon(read)
        await cluster.busy()
        tasks.cancel_scope.cancel()
    await cluster.idle()


async def test_a_bare_publish_ends_a_stream_with_one_error_event(
    cluster: Cluster, client: AsyncOpenAI, stock_nats: NatsClient
) -> None:
    texts = []
    with pytest.raises(APIError) as raised:
        async for chunk in await client.chat.completions.create(stream=True, **LONG):
            texts.append(chunk.choices[0].delta.content or "")
            if len(texts) == 3:
                await stock_nats.publish(f"busllm.local.abort.{chunk.id.removeprefix('chatcmpl-')}", b"")
    assert raised.value.code == "aborted"
    assert any(texts)
    await cluster.idle()


async def test_a_bare_publish_ends_a_whole_answer_with_499(
    cluster: Cluster, client: AsyncOpenAI, stock_nats: NatsClient
) -> None:
    tokenized = await stock_nats.subscribe("busllm.local.trace.*.scheduler.first_token")
    await stock_nats.flush()
    with pytest.raises(APIStatusError) as raised:
        async with anyio.create_task_group() as tasks:

            async def abort() -> None:
                uid = (await tokenized.next_msg(20)).subject.split(".")[3]
                await stock_nats.publish(f"busllm.local.abort.{uid}", b"")

            tasks.start_soon(abort)
            try:
                await client.chat.completions.create(**LONG)
            except APIStatusError as error:
                caught = error
        raise caught
    assert (raised.value.status_code, raised.value.code) == (499, "aborted")
    await cluster.idle()
