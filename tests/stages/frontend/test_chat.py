"""Chat completions over real HTTP, streamed and not, against an owner that says what it is told."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from busllm.messages.to_tokenizer import ChatPrompt
from busllm.testing.fake_owner import WORDS, FakeOwner
from busllm.testing.frontend_server import MODEL, FrontendServer, serving
from busllm.testing.http_oracles import check_stream, parse_events

pytestmark = pytest.mark.anyio

TEXT = "".join(WORDS)
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, **fields}


async def post(server: FrontendServer, **fields: Any) -> Any:
    return await server.client.post("/v1/chat/completions", json=chat(**fields))


async def test_an_answer_has_openais_shape_and_the_uid_in_its_id_and_header() -> None:
    async with serving(FakeOwner()) as server:
        answer = await post(server)
    assert answer.status_code == 200
    body = answer.json()
    assert body["id"] == f"chatcmpl-{answer.headers['x-request-id']}"
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]
    usage = body["usage"]
    assert usage["completion_tokens"] == len(WORDS)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_the_streamed_text_is_the_whole_text() -> None:
    async with serving(FakeOwner()) as server:
        whole = (await post(server)).json()
        streamed = await post(server, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    choices = check_stream(streamed.content, 1, chat=True)
    assert choices[0].text == whole["choices"][0]["message"]["content"]
    assert choices[0].finish_reason == whole["choices"][0]["finish_reason"]
    assert f"chatcmpl-{streamed.headers['x-request-id']}".encode() in streamed.content


@pytest.mark.parametrize("n", [1, 3])
async def test_every_choice_has_its_index_role_and_end(n: int) -> None:
    async with serving(FakeOwner()) as server:
        streamed = await post(server, n=n, stream=True)
        whole = (await post(server, n=n)).json()
    choices = check_stream(streamed.content, n, chat=True)
    assert [choice.text for choice in choices.values()] == [TEXT] * n
    assert [choice["index"] for choice in whole["choices"]] == list(range(n))


async def test_prompt_tokens_count_once_however_many_choices_there_are() -> None:
    async with serving(FakeOwner()) as server:
        one = (await post(server)).json()["usage"]
        three = (await post(server, n=3)).json()["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_usage_chunk_comes_last_when_asked_for_and_equals_the_whole_answers(n: int) -> None:
    async with serving(FakeOwner()) as server:
        streamed = await post(server, n=n, stream=True, stream_options={"include_usage": True}, max_tokens=1)
        whole = (await post(server, n=n, max_tokens=1)).json()
    choices = check_stream(streamed.content, n, chat=True, with_usage=True)
    assert all(choice.finish_reason == "length" for choice in choices.values())
    assert whole["usage"] == _last_usage(streamed.content)


@pytest.mark.parametrize("options", [{"include_usage": False}, {}, None, {"include_usage": None}])
async def test_no_usage_is_streamed_unless_asked_for(options: dict[str, Any] | None) -> None:
    async with serving(FakeOwner()) as server:
        streamed = await post(server, stream=True, stream_options=options)
    check_stream(streamed.content, 1, chat=True, with_usage=False)


async def test_log_probabilities_have_bytes_and_as_many_alternatives_as_asked_for() -> None:
    async with serving(FakeOwner()) as server:
        whole = (await post(server, logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]
        streamed = await post(server, logprobs=True, top_logprobs=2, stream=True)
        none = (await post(server, logprobs=True)).json()["choices"][0]["logprobs"]
    first = whole["content"][0]
    assert first["token"] == "The"
    assert bytes(first["bytes"]) == b"The"
    assert [len(token["top_logprobs"]) for token in whole["content"]] == [2] * len(WORDS)
    assert check_stream(streamed.content, 1, chat=True)[0].logprobs == whole["content"]
    assert [token["top_logprobs"] for token in none["content"]] == [[]] * len(WORDS)


async def test_developer_becomes_system_and_text_parts_are_joined() -> None:
    owner = FakeOwner()
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}], "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "1", "unheard_of": 10**30},
    ]
    async with serving(owner) as server:
        answer = await post(server, messages=messages, add_generation_prompt=False, chat_template_kwargs={"x": 1})
    assert answer.status_code == 200
    prompt = owner.submitted[0].prompts[0]
    assert prompt == ChatPrompt(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello there"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function"}]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ],
        template_options={"x": 1, "add_generation_prompt": False},
    )


async def test_every_sampling_field_reaches_the_request() -> None:
    owner = FakeOwner()
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "min_tokens": 2, "ignore_eos": True,
        "seed": -5, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5,
        "skip_special_tokens": False, "stop_token_ids": [3, 4],
    }  # fmt: skip
    async with serving(owner) as server:
        answer = await post(server, **fields, stop="x", logit_bias={"258": -100, "0": 1.5}, max_completion_tokens=9)
    assert answer.status_code == 200, answer.text
    params = owner.submitted[0].params
    for name, value in fields.items():
        given = list(getattr(params, name)) if isinstance(value, list) else getattr(params, name)
        assert given == value, name
    assert params.stop == ("x",)
    assert params.logit_bias == ((258, -100.0), (0, 1.5))
    assert params.max_tokens == 9


async def test_defaults_are_openais_and_null_means_not_given() -> None:
    owner = FakeOwner()
    nulls = dict.fromkeys(["temperature", "top_p", "n", "stop", "seed", "max_tokens", "logprobs", "stream", "tools"])
    async with serving(owner) as server:
        await post(server)
        await post(server, **nulls)
    assert owner.submitted[0] == owner.submitted[1]
    params = owner.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, None, None)


@pytest.mark.parametrize("top_k", [0, -1, 259, 1000])
async def test_a_top_k_that_keeps_every_token_is_off(top_k: int) -> None:
    owner = FakeOwner()
    async with serving(owner) as server:
        await post(server, top_k=top_k)
    assert owner.submitted[0].params.top_k is None


@pytest.mark.parametrize(
    ("stop", "stops"), [([], ()), (None, ()), ("a", ("a",)), (["b"] * 5, ("b",) * 5), (["x" * 10_000], ("x" * 10_000,))]
)
async def test_a_stop_is_one_text_or_several(stop: Any, stops: tuple[str, ...]) -> None:
    owner = FakeOwner()
    async with serving(owner) as server:
        answer = await post(server, stop=stop)
    assert answer.status_code == 200
    assert owner.submitted[0].params.stop == stops


async def test_harmless_fields_of_openai_are_accepted() -> None:
    fields = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s",
        "prompt_cache_key": "k", "tools": [], "tool_choice": "auto", "response_format": {"type": "text"},
        "modalities": ["text"], "parallel_tool_calls": True, "reasoning_effort": "none",
    }  # fmt: skip
    async with serving(FakeOwner()) as server:
        answer = await post(server, **fields)
        ignored = await post(server, tools=[{"type": "function"}], tool_choice="none")
    assert answer.status_code == 200, answer.text
    assert ignored.status_code == 200, ignored.text


async def test_openais_client_reads_answers_and_streams() -> None:
    async with serving(FakeOwner()) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=1)
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        await client.close()
    assert whole.choices[0].message.content == TEXT
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def _last_usage(raw: bytes) -> Any:
    return parse_events(raw)[-2]["usage"]
