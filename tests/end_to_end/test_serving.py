"""The default model behind HTTP, on every topology the same: what a user of the stock `openai` client sees."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from openai import AsyncOpenAI

from tests.end_to_end.cluster import Cluster
from tests.end_to_end.conftest import MODEL

pytestmark = pytest.mark.anyio

CAPITAL = "What is the capital of France?"
LOOSE_START_S = 30.0  # on a machine of its own it takes three; this one may be shared
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 11, "extra_body": {"top_k": 40}}
CITIES = (
    *("Paris", "London", "Rome", "Madrid", "Berlin", "Vienna", "Athens", "Oslo"),
    *("Lisbon", "Dublin", "Prague", "Warsaw", "Tokyo", "Cairo", "Lima", "Delhi"),
)  # fmt: skip


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def chat(client: AsyncOpenAI, text: str, **options: Any) -> Any:
    return await client.chat.completions.create(model=MODEL, messages=says(text), **options)


async def streamed_chat(client: AsyncOpenAI, text: str, **options: Any) -> tuple[str, list[Any]]:
    """The text of the only choice, and all chunks."""
    chunks = [chunk async for chunk in await chat(client, text, stream=True, **options)]
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    return "".join(deltas), chunks


async def whole_completion(client: AsyncOpenAI, prompt: str, **options: Any) -> str:
    return (await client.completions.create(model=MODEL, prompt=prompt, **options)).choices[0].text


async def streamed_completion(client: AsyncOpenAI, prompt: str, **options: Any) -> str:
    stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True, **options)
    return "".join([choice.text async for chunk in stream for choice in chunk.choices])


async def test_it_is_ready_soon_after_its_start(cluster: Cluster, record_property: Any) -> None:
    assert cluster.seconds_to_ready is not None
    record_property("seconds_to_ready", round(cluster.seconds_to_ready, 2))
    assert cluster.seconds_to_ready < LOOSE_START_S


async def test_the_stock_client_streams_paris(client: AsyncOpenAI) -> None:
    text, chunks = await streamed_chat(client, CAPITAL, temperature=0)
    assert "Paris" in text
    assert len(chunks) > 3
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"


async def test_the_model_is_listed_under_its_name(client: AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [MODEL]


@pytest.mark.parametrize("options", [{"temperature": 0}, SAMPLED], ids=["greedy", "sampled"])
async def test_a_streamed_text_is_the_whole_one_and_comes_again(client: AsyncOpenAI, options: dict[str, Any]) -> None:
    whole = (await chat(client, CAPITAL, max_tokens=12, **options)).choices[0].message.content
    streamed, _ = await streamed_chat(client, CAPITAL, max_tokens=12, **options)
    assert streamed == whole
    completion = await whole_completion(client, "One, two, three,", max_tokens=10, **options)
    assert await streamed_completion(client, "One, two, three,", max_tokens=10, **options) == completion


async def test_another_seed_gives_another_text(client: AsyncOpenAI) -> None:
    texts = {await whole_completion(client, "I like", max_tokens=8, temperature=1, seed=seed) for seed in (1, 2)}
    assert len(texts) == 2


async def test_limits_and_stop_strings_end_an_answer(client: AsyncOpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        short = await chat(client, CAPITAL, temperature=0, **{name: 4})
        assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 4)
    full = (await chat(client, CAPITAL, temperature=0)).choices[0].message.content
    cut = await chat(client, CAPITAL, temperature=0, stop=[" France"])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (full.partition(" France")[0], "stop")
    streamed, _ = await streamed_chat(client, CAPITAL, temperature=0, stop=[" France"])
    assert streamed == cut.choices[0].message.content


async def test_ignoring_the_end_of_turn_goes_on_to_the_limit(client: AsyncOpenAI) -> None:
    answer = await chat(client, CAPITAL, temperature=0, max_tokens=16, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 16)


async def test_three_choices_differ_and_the_prompt_is_counted_once(client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {"n": 3, "max_tokens": 8, "temperature": 1, "seed": 5}
    whole = await chat(client, CAPITAL, **options)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) > 1
    alone = await chat(client, CAPITAL, max_tokens=1)
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    streamed = dict.fromkeys(range(3), "")
    async for chunk in await chat(client, CAPITAL, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


async def test_usage_comes_last_in_a_stream_that_asks_for_it(client: AsyncOpenAI) -> None:
    whole = await chat(client, CAPITAL, temperature=0)
    _, chunks = await streamed_chat(client, CAPITAL, temperature=0, stream_options={"include_usage": True})
    *others, last = chunks
    assert all(chunk.usage is None for chunk in others)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


async def test_sixteen_clients_share_steps_and_each_gets_its_own_answer(
    cluster: Cluster, client: AsyncOpenAI, solo_answers: dict[str, str]
) -> None:
    options: dict[str, Any] = {"max_tokens": 10, "temperature": 0, "extra_body": {"ignore_eos": True}}
    questions = [f"Tell me about {city}." for city in CITIES]
    if not solo_answers:
        for question in questions:
            solo_answers[question] = (await chat(client, question, **options)).choices[0].message.content
    await cluster.idle()
    before = await cluster.counts()
    together: dict[str, str] = {}

    async def ask(question: str) -> None:
        together[question], _ = await streamed_chat(client, question, **options)

    async with anyio.create_task_group() as tasks:
        for question in questions:
            tasks.start_soon(ask, question)
    await cluster.idle()
    after = await cluster.counts()
    assert together == solo_answers
    assert len(set(together.values())) == len(CITIES)
    tokens = after["scheduler_tokens.output"] - before["scheduler_tokens.output"]
    steps = after["scheduler_steps"] - before["scheduler_steps"]
    assert tokens == 10 * len(CITIES)
    assert steps < tokens / 3, f"{steps} steps for {tokens} tokens"
