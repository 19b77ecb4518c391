"""Requests that are larger than what a bus carries in one message: served in parts, or refused with the numbers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from busllm.bus.memory import MemoryBus
from busllm.bus.nats import NatsBus
from busllm.bus.nats_options import NatsOptions
from busllm.bus.nats_server import EmbeddedNatsServer, NatsServerOptions
from busllm.bus.protocol import Bus
from busllm.model_store.description import NULL_MAX_CONTEXT_TOKENS, NULL_VOCAB_SIZE
from busllm.testing.frontend_server import MODEL, fake_settings, serving
from busllm.testing.http_oracles import check_error
from busllm.testing.stack import running_stack

pytestmark = pytest.mark.anyio

SMALL = 4096  # bytes; less than a NATS server carries by default, so that prompts may be short
LONG_TEXT = "long prompt " * 500
SETTINGS = fake_settings(max_model_len=NULL_MAX_CONTEXT_TOKENS, vocab_size=NULL_VOCAB_SIZE)


@asynccontextmanager
async def client_of(bus: Bus) -> AsyncIterator[httpx.AsyncClient]:
    async with running_stack(bus) as stack, serving(stack.owner, SETTINGS) as server:
        yield server.client


@pytest.fixture(params=["memory", "nats"])
async def small(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """HTTP in front of a bus that carries little in one message."""
    if request.param == "memory":
        async with client_of(MemoryBus(max_payload_bytes=SMALL)) as client:
            yield client
        return
    server = EmbeddedNatsServer(NatsServerOptions(runtime_dir=tmp_path, max_payload_bytes=SMALL))
    await server.start()
    try:
        async with client_of(NatsBus(NatsOptions(urls=(server.url,)))) as client:
            yield client
    finally:
        await server.stop()


def completion(prompt: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 40, "seed": 7, **fields}


def text_of(answer: httpx.Response) -> str:
    """The text of one choice, streamed or not."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        return str(answer.json()["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_and_its_logprobs_travel_in_parts_and_change_nothing(
    small: httpx.AsyncClient, stream: bool
) -> None:
    path, body = completion(LONG_TEXT, echo=True, logprobs=5, stream=stream)
    through_small = text_of(await small.post(path, json=body))
    async with client_of(MemoryBus()) as client:
        assert through_small == text_of(await client.post(path, json=body))
    assert through_small.startswith(LONG_TEXT)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"model": MODEL, "prompt": LONG_TEXT}),
        ("/detokenize", {"model": MODEL, "tokens": [100] * 3000}),
        completion([100] * 3000, echo=True),
        completion([100] * 3000, echo=True, stream=True),
    ],
    ids=["tokenize", "detokenize", "echo", "streamed echo"],
)
async def test_a_question_that_the_bus_does_not_carry_is_a_413_with_the_numbers(
    small: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await small.post(path, json=body)
    check_error(answer.status_code, answer.headers, answer.content, code="request_too_large")
    assert answer.status_code == 413
    message = answer.json()["error"]["message"]
    assert f"{SMALL} bytes" in message
    assert "busllm." not in message, "clients learn no subjects"
    async with client_of(MemoryBus()) as client:
        assert (await client.post(path, json=body)).status_code == 200


async def test_an_answer_that_the_bus_does_not_carry_is_a_413_with_the_numbers(small: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "x" * 3000}
    answer = await small.post("/tokenize", json=body)
    check_error(answer.status_code, answer.headers, answer.content, code="answer_too_large")
    assert answer.status_code == 413
    message = answer.json()["error"]["message"]
    assert f"{SMALL} bytes" in message
    assert "busllm." not in message
    assert (await small.post("/tokenize", json=body | {"prompt": "x" * 100})).json()["count"] == 100
