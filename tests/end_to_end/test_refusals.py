"""Requests that cannot be served: one envelope, streamed and not, on every topology; and nothing is left of them."""

from __future__ import annotations

import json
import re
from typing import Any

import anyio
import pytest
from openai import APIStatusError, AsyncOpenAI

from busllm.testing.http_oracles import check_error, check_stream
from tests.end_to_end.cluster import Cluster
from tests.end_to_end.conftest import MAX_BODY_BYTES, MAX_QUEUED, MODEL

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "x"}]

BAD: list[tuple[str, str, dict[str, Any], int, str | None, str | None]] = [
    # name, path, fields, status, code, param
    ("over-long prompt", COMPLETIONS, {"prompt": "one " * 8500}, 400, "context_length_exceeded", "prompt"),
    ("over-long chat", CHAT, {"messages": [{"role": "user", "content": "one " * 8500}]}, 400, "context_length_exceeded",
     "messages"),
    ("no tokens", COMPLETIONS, {"prompt": []}, 400, None, "prompt"),
    ("token ids beyond the vocabulary", COMPLETIONS, {"prompt": [49152]}, 400, None, "prompt"),
    ("no messages", CHAT, {"messages": []}, 400, None, "messages"),
    ("unknown model", CHAT, {"messages": USER, "model": "gpt-9"}, 404, "model_not_found", "model"),
    ("text for a number", CHAT, {"messages": USER, "max_tokens": "7"}, 400, None, "max_tokens"),
    ("a bool for a number", COMPLETIONS, {"prompt": "x", "n": True}, 400, None, "n"),
    ("an empty stop string", COMPLETIONS, {"prompt": "x", "stop": ""}, 400, None, "stop"),
    ("too large a body", COMPLETIONS, {"prompt": "x" * MAX_BODY_BYTES}, 413, None, None),
]  # fmt: skip


async def test_every_refusal_is_the_same_streamed_and_not(cluster: Cluster) -> None:
    async with cluster.http() as http:
        for name, path, fields, status, code, param in BAD:
            errors = []
            for stream in (False, True):
                answer = await http.post(path, json={"model": MODEL, "stream": stream, **fields})
                assert answer.status_code == status, (name, stream, answer.text)
                error = check_error(answer.status_code, answer.headers, answer.content, code=code, param=param)
                errors.append(error | {"message": re.sub(r"\d+", "N", error["message"])})  # the bodies differ in length
            assert errors[0] == errors[1], name
    await cluster.idle()


async def test_what_is_not_json_is_refused(cluster: Cluster) -> None:
    async with cluster.http() as http:
        for body in (b"", b"{", b"nonsense", b'{"model": "\xff"}'):
            answer = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text
            check_error(answer.status_code, answer.headers, answer.content)


async def test_a_full_queue_refuses_what_is_too_much_and_serves_the_rest(cluster: Cluster, client: AsyncOpenAI) -> None:
    outcomes: list[str | int] = []

    async def ask(number: int) -> None:
        try:
            answer = await client.completions.create(
                model=MODEL, prompt=f"Number {number} is", max_tokens=2, temperature=0, stream=number % 2 == 1
            )
            outcomes.append("streamed" if number % 2 == 1 else answer.choices[0].finish_reason)
            if number % 2 == 1:
                assert [chunk async for chunk in answer]
        except APIStatusError as error:
            headers, raw = error.response.headers, error.response.content or await error.response.aread()
            check_error(error.status_code, headers, raw, code="queue_full")
            assert "retry-after" in headers
            outcomes.append(error.status_code)

    async with anyio.create_task_group() as tasks:
        for number in range(MAX_QUEUED + 24):
            tasks.start_soon(ask, number)
    assert outcomes.count(429) == len([outcome for outcome in outcomes if isinstance(outcome, int)]) > 0
    assert len(outcomes) - outcomes.count(429) >= MAX_QUEUED
    await cluster.idle()


async def test_unknown_paths_and_methods_are_refused_in_the_same_form(cluster: Cluster) -> None:
    async with cluster.http() as http:
        for method, path, status in (("GET", "/v1/nothing", 404), ("GET", CHAT, 405)):
            answer = await http.request(method, path)
            assert answer.status_code == status
            check_error(answer.status_code, answer.headers, answer.content)


async def test_after_all_that_a_stream_keeps_every_rule(cluster: Cluster) -> None:
    fields = {"model": MODEL, "messages": USER, "stream": True, "n": 2, "max_tokens": 4}
    async with cluster.http() as http:
        answer = await http.post(CHAT, content=json.dumps(fields), headers={"content-type": "application/json"})
    check_stream(answer.content, 2, chat=True)
