"""The default model under a grammar, over HTTP, on every topology: what comes back parses and validates."""

from __future__ import annotations

import json
import re
from typing import Any

import anyio
import pytest
from openai import AsyncOpenAI

from busllm.testing.http_oracles import check_error
from tests.end_to_end.cluster import Cluster
from tests.end_to_end.conftest import MODEL

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED: list[Any] = [{"role": "user", "content": "Describe the city of Paris as JSON."}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "continent": {"enum": ["Africa", "Asia", "Europe"]},
        "is_capital": {"type": "boolean"},
        "districts": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "continent", "is_capital", "districts"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}},
     "response_format.json_schema.schema"),
    ({"structured_outputs": {"json": '{"type":'}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "[0-9"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
]  # fmt: skip


def check_city(text: str) -> None:
    city = json.loads(text)
    assert list(city) == CITY["required"]
    assert len(city["name"]) <= 12
    assert city["continent"] in CITY["properties"]["continent"]["enum"]
    assert type(city["is_capital"]) is bool
    assert 1 <= city["districts"] <= 99


async def test_answers_follow_their_schema_beside_free_ones_which_stay_as_they_are(client: AsyncOpenAI) -> None:
    structured: list[str] = []
    free: list[str] = []

    async def ask(seed: int) -> None:
        options: dict[str, Any] = {"max_tokens": 150, "temperature": 0.7, "seed": seed, "response_format": FORMAT}
        answer = await client.chat.completions.create(model=MODEL, messages=ASKED, **options)
        assert answer.choices[0].finish_reason == "stop"
        structured.append(answer.choices[0].message.content or "")

    async def ask_freely() -> None:
        answer = await client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=12, temperature=0)
        free.append(answer.choices[0].message.content or "")

    await ask_freely()
    async with anyio.create_task_group() as tasks:
        for seed in range(3):
            tasks.start_soon(ask, seed)
            tasks.start_soon(ask_freely)
    for text in structured:
        check_city(text)
    assert len(set(free)) == 1


async def test_a_stream_is_the_whole_answer_and_the_usual_settings_hold(client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {"max_tokens": 150, "temperature": 0, "response_format": FORMAT}
    whole = await client.chat.completions.create(model=MODEL, messages=ASKED, logprobs=True, **options)
    check_city(whole.choices[0].message.content or "")
    assert whole.choices[0].logprobs is not None
    assert whole.usage is not None
    assert len(whole.choices[0].logprobs.content or ()) == whole.usage.completion_tokens
    stream = await client.chat.completions.create(model=MODEL, messages=ASKED, stream=True, **options)
    deltas = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
    assert "".join(deltas) == whole.choices[0].message.content


async def test_every_form_works_on_completions_with_several_choices(client: AsyncOpenAI) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"choice": ["Paris", "London", "the Moon"]}, "Paris|London|the Moon"),
        ({"regex": "[A-Z][a-z]{2,8}, [0-9]{4}"}, "[A-Z][a-z]{2,8}, [0-9]{4}"),
        ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
        (
            {"json": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}},
            r"\[\s*[12]\s*,\s*[12]\s*\]",
        ),
    ]
    for form, pattern in forms:
        answer = await client.completions.create(
            model=MODEL,
            prompt="The capital of France is",
            n=2,
            max_tokens=100,
            seed=4,
            extra_body={"structured_outputs": form},
        )
        for choice in answer.choices:
            assert re.fullmatch(pattern, choice.text), (form, choice.text)
            assert choice.finish_reason == "stop"


async def test_a_grammar_that_does_not_compile_is_the_same_400_streamed_and_not(cluster: Cluster) -> None:
    await cluster.idle()
    steps = (await cluster.counts())["scheduler_steps"]
    async with cluster.http() as http:
        for path, prompt in ((CHAT, {"messages": ASKED}), (COMPLETIONS, {"prompt": "x"})):
            for fields, param in BAD:
                errors = []
                for stream in (False, True):
                    answer = await http.post(path, json={"model": MODEL, "stream": stream, **prompt, **fields})
                    assert answer.status_code == 400, answer.text
                    errors.append(check_error(answer.status_code, answer.headers, answer.content, param=param))
                assert errors[0] == errors[1]
    await cluster.idle()
    assert (await cluster.counts())["scheduler_steps"] == steps
