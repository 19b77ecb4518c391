"""Completions over real HTTP: forms of prompts, echo, log probabilities, streamed and not."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from busllm.messages.codec import pack_ids
from busllm.messages.to_tokenizer import TextPrompt, TokenPrompt
from busllm.testing.fake_owner import WORDS, FakeOwner
from busllm.testing.frontend_server import MODEL, FrontendServer, serving
from busllm.testing.http_oracles import check_stream

pytestmark = pytest.mark.anyio

TEXT = "".join(WORDS)


async def post(server: FrontendServer, **fields: Any) -> Any:
    return await server.client.post("/v1/completions", json={"model": MODEL, **fields})


async def test_an_answer_has_openais_shape() -> None:
    async with serving(FakeOwner()) as server:
        answer = await post(server, prompt="Red is a")
    body = answer.json()
    assert body["id"] == f"cmpl-{answer.headers['x-request-id']}"
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": TEXT, "finish_reason": "stop", "logprobs": None}]


async def test_the_default_limit_is_openais_sixteen_tokens() -> None:
    owner = FakeOwner()
    async with serving(owner) as server:
        await post(server, prompt="x")
    assert owner.submitted[0].params.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", (TextPrompt("a"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 258], (TokenPrompt(pack_ids([1, 258])),)),
        ([[1], [2, 3]], (TokenPrompt(pack_ids([1])), TokenPrompt(pack_ids([2, 3])))),
        ("", (TextPrompt(""),)),
    ],
)
async def test_each_form_of_a_prompt_is_told_apart(prompt: Any, prompts: tuple[Any, ...]) -> None:
    owner = FakeOwner()
    async with serving(owner) as server:
        answer = await post(server, prompt=prompt)
    assert answer.status_code == 200, answer.text
    assert owner.submitted[0].prompts == prompts


async def test_a_list_of_prompts_is_numbered_prompt_by_prompt_in_one_answer() -> None:
    prompts = ["Red is a", "Seven plus two is", "The sea is"]
    async with serving(FakeOwner()) as server:
        whole = (await post(server, prompt=prompts, n=2, max_tokens=6)).json()
        streamed = await post(
            server, prompt=prompts, n=2, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert whole["usage"]["prompt_tokens"] == sum(len(prompt) for prompt in prompts)
    assert whole["usage"]["completion_tokens"] == 36
    choices = check_stream(streamed.content, 6, chat=False, with_usage=True)
    assert [choices[index].text for index in range(6)] == [choice["text"] for choice in whole["choices"]]


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", ["Alpha beta", list(b"Alpha beta")])
async def test_echo_puts_the_prompt_first_in_each_choice(max_tokens: int, n: int, prompt: Any) -> None:
    fields: dict[str, Any] = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "n": n, "logprobs": 2}
    async with serving(FakeOwner()) as server:
        whole = (await post(server, **fields)).json()
        streamed = await post(server, **fields, stream=True)
    choices = check_stream(streamed.content, n, chat=False)
    for choice in whole["choices"]:
        assert choice["text"] == "Alpha beta" + "".join(WORDS[:max_tokens])
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {10 + max_tokens}
        assert logprobs["token_logprobs"][0] is None
        assert all(value is not None for value in logprobs["token_logprobs"][1:])
        assert "".join(logprobs["tokens"]) == choice["text"]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset : offset + len(token)] == token
        stream = choices[choice["index"]]
        assert stream.text == choice["text"]
        joined = {name: [value for part in stream.logprobs for value in part[name]] for name in logprobs}
        assert joined == logprobs


async def test_echo_without_log_probabilities_asks_for_none() -> None:
    owner = FakeOwner()
    async with serving(owner) as server:
        answer = await post(server, prompt="Alpha", echo=True, max_tokens=0)
    assert answer.json()["choices"][0] == {"index": 0, "text": "Alpha", "finish_reason": "length", "logprobs": None}
    assert owner.submitted[0].params.prompt_logprobs is None


async def test_zero_alternatives_still_show_the_chosen_tokens() -> None:
    async with serving(FakeOwner()) as server:
        zero = (await post(server, prompt="x", logprobs=0)).json()["choices"][0]["logprobs"]
        none = (await post(server, prompt="x", logprobs=None)).json()["choices"][0]["logprobs"]
        two = (await post(server, prompt="x", logprobs=2)).json()["choices"][0]["logprobs"]
    assert zero["tokens"] == list(WORDS)
    assert zero["top_logprobs"] == [{}] * len(WORDS)
    assert none is None
    assert two["top_logprobs"][0] == {"The": -0.5, "alternative 1": -1.5}


@pytest.mark.parametrize("best_of", [None, 2])
async def test_best_of_equal_to_n_changes_nothing(best_of: int | None) -> None:
    async with serving(FakeOwner()) as server:
        answer = await post(server, prompt="x", n=2, best_of=best_of, suffix="")
    assert len(answer.json()["choices"]) == 2


async def test_openais_client_reads_answers_and_streams() -> None:
    async with serving(FakeOwner()) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        whole = await client.completions.create(model=MODEL, prompt="x", logprobs=1)
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        await client.close()
    assert whole.choices[0].text == text == TEXT
