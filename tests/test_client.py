"""`busllm.Client` against the whole path around the null engine, over NATS."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import numpy as np
import pytest

import busllm
from busllm.bus.memory import MemoryBus
from busllm.client import Client, ClientOptions
from busllm.engine.null import NullSequence
from busllm.errors import Aborted, BusllmError, BusPermissionDenied, BusUnavailable, InvalidRequest
from busllm.ids import new_uid
from busllm.messages.codec import pack_ids
from busllm.sampling import SamplingParams
from busllm.telemetry.trace import TraceEvent
from busllm.testing.nats_stack import running_nats_stack
from busllm.testing.stack import FAST_TIMINGS, Stack, StackConfig, running_stack

pytestmark = pytest.mark.anyio

PATIENCE_S = 30.0
QUICK = ClientOptions(timings=FAST_TIMINGS, connect_wait_s=5.0)
ENDLESS = SamplingParams(max_tokens=50_000, seed=7)


def expected(prompt: str, num_tokens: int) -> str:
    """What the null model answers, by its definition."""
    prompt_ids = pack_ids(np.frombuffer(prompt.encode(), dtype=np.uint8).astype(np.int32))
    sequence = NullSequence(prompt_ids, SamplingParams(), 7, None)
    return bytes(sequence.token(len(prompt) + i) for i in range(num_tokens)).decode()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[Stack, str]]:
    with anyio.fail_after(PATIENCE_S):
        async with running_nats_stack(tmp_path, StackConfig(step_time_s=0.002)) as running:
            yield running


def client_of(url: str) -> Client:
    return busllm.Client(url, cluster="test", options=QUICK)


def num_held(stack: Stack) -> int:
    counts = {name: actor.announcement().statistics for name, actor in stack.actors.items()}
    return int(
        counts["tokenizer:0"]["requests"]
        + counts["scheduler:0"]["sequences"]
        + counts["detokenizer:0"]["open_sequences"]
    )


async def test_the_deltas_of_a_text_prompt_join_to_the_models_answer(cluster: tuple[Stack, str]) -> None:
    async with client_of(cluster[1]) as client:
        generation = client.generate("once", SamplingParams(max_tokens=40, seed=7))
        deltas = [delta async for delta in generation]
    assert "".join(delta.text for delta in deltas) == expected("once", 40)
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]


async def test_text_token_ids_and_messages_are_all_prompts(cluster: tuple[Stack, str]) -> None:
    params = SamplingParams(max_tokens=10, seed=7)
    async with client_of(cluster[1]) as client:
        from_text = await client.complete("abc", params)
        from_ids = await client.complete([97, 98, 99], params)
        from_messages = await client.complete([{"role": "user", "content": "abc"}], params)
    assert from_text.text == from_ids.text == expected("abc", 10)
    assert (from_text.finish_reason, from_text.usage.prompt_tokens, len(from_text.token_ids)) == ("length", 3, 10)
    assert from_messages.usage.prompt_tokens > 3


async def test_each_of_several_choices_is_told_by_its_number(cluster: tuple[Stack, str]) -> None:
    texts = {0: "", 1: "", 2: ""}
    async with client_of(cluster[1]) as client:
        async for delta in client.generate("several", SamplingParams(max_tokens=20, seed=7), n=3):
            texts[delta.choice] += delta.text
    assert texts[0] == expected("several", 20)
    assert len(set(texts.values())) == 3


@pytest.mark.parametrize(
    "prompt", [[], [1, "a"], [True], [-1], [2**31], [{"role": "user"}, 5], "lone \ud800 surrogate"]
)
async def test_a_prompt_that_no_message_can_carry_is_refused_before_anything_is_sent(prompt: object) -> None:
    async with running_stack(bus := MemoryBus()), Client(bus, cluster="test", options=QUICK) as client:
        with pytest.raises(InvalidRequest):
            client.generate(prompt)  # type: ignore[arg-type]


async def test_settings_out_of_range_are_refused_and_the_models_limits_come_with_the_first_delta() -> None:
    async with running_stack(bus := MemoryBus()), Client(bus, cluster="test", options=QUICK) as client:
        with pytest.raises(InvalidRequest):
            client.generate("x", SamplingParams(temperature=-1.0))
        with pytest.raises(InvalidRequest):
            client.generate("x", n=0)
        with pytest.raises(BusllmError) as raised:
            await client.complete([2**31 - 1])
    assert raised.value.status == 400


async def test_leaving_the_loop_ends_the_request_everywhere(cluster: tuple[Stack, str]) -> None:
    stack, url = cluster
    async with client_of(url) as client:
        async for delta in client.generate("endless", ENDLESS):
            if delta.text:
                assert num_held(stack) > 0
                break
        await stack.wait_for(lambda: num_held(stack) == 0)


async def test_leaving_the_client_ends_its_requests_everywhere(cluster: tuple[Stack, str]) -> None:
    stack, url = cluster
    async with client_of(url) as client:
        generation = client.generate("endless", ENDLESS)
        assert (await anext(generation)).choice == 0
    await stack.wait_for(lambda: num_held(stack) == 0)


async def test_an_abort_ends_the_request_of_another_owner(cluster: tuple[Stack, str]) -> None:
    stack, url = cluster
    async with client_of(url) as reader, client_of(url) as operator:
        generation = reader.generate("endless", ENDLESS)
        await anext(generation)
        held = await operator.holders(generation.uid)
        assert {held.states[reader.instance], held.states[stack.actors["scheduler:0"].instance]} == {"open", "running"}
        await operator.abort(generation.uid)
        with pytest.raises(Aborted):
            async for _ in generation:
                pass
        await stack.wait_for(lambda: num_held(stack) == 0)
        assert not (await operator.holders(generation.uid)).states


async def test_a_word_that_is_no_uid_is_refused(cluster: tuple[Stack, str]) -> None:
    async with client_of(cluster[1]) as client:
        for word in ("", "*", ">", "a.b", "A" * 20, "a" * 19):
            with pytest.raises(InvalidRequest):
                await client.abort(word)
            with pytest.raises(InvalidRequest):
                await client.trace(word)


async def test_a_trace_has_the_events_of_every_stage_on_the_way(cluster: tuple[Stack, str]) -> None:
    async with client_of(cluster[1]) as client, client_of(cluster[1]) as other:
        generation = client.generate("traced", SamplingParams(max_tokens=5, seed=7))
        await generation.whole()
        traces = await other.trace(generation.uid)
        latest = await other.latest_traces(10)
        nothing = await other.trace(new_uid())
    names = {(event.stage, event.event) for event in traces.events}
    assert names >= {("client", "received"), ("client", "first_text"), ("client", "finished")}
    assert names >= {("tokenizer", "tokenized"), ("detokenizer", "finished")}
    assert names >= {("scheduler", name) for name in ("queued", "admitted", "prefilled", "first_token", "finished")}
    assert traces.silent == {}
    assert {event.uid for event in latest.events} == {generation.uid}
    assert nothing.events == ()


async def test_followed_traces_begin_with_the_block_and_hold_one_request_or_all(cluster: tuple[Stack, str]) -> None:
    params = SamplingParams(max_tokens=3, seed=7)
    async with client_of(cluster[1]) as client, client_of(cluster[1]) as watcher:
        async with watcher.follow_traces() as events:
            generation = client.generate("followed", params)
            seen: list[TraceEvent] = []
            async for event in events:
                seen.append(event)
                if {("client", "finished"), ("detokenizer", "finished")} <= {(one.stage, one.event) for one in seen}:
                    break
        assert {event.uid for event in seen} == {generation.uid}
        assert ("client", "received") in {(event.stage, event.event) for event in seen}
        stopped = client.generate("watched", ENDLESS)
        async with watcher.follow_traces(stopped.uid) as events:
            await client.complete("another", params)
            await stopped.aclose()
            ended = [event async for event in _until_aborted(events)]
        assert {event.uid for event in ended} == {stopped.uid}


async def _until_aborted(events: AsyncIterator[TraceEvent]) -> AsyncIterator[TraceEvent]:
    async for event in events:
        yield event
        if event.event == "aborted":
            return


async def test_every_stage_is_listed_and_can_be_asked(cluster: tuple[Stack, str]) -> None:
    async with client_of(cluster[1]) as client:
        kinds = sorted(announced.kind for announced in await client.stages())
        assert kinds == ["client", "detokenizer", "scheduler", "tokenizer"]
        assert await client.ask("tokenizer", "tokenize", {"prompt": "ab"}) == {"token_ids": [97, 98]}
        assert not any(client.is_silent(announced.instance) for announced in await client.stages())
        with pytest.raises(BusllmError):
            await client.ask("tokenizer", "no_such_verb", {})


async def test_a_bus_that_cannot_be_reached_is_reported_in_time() -> None:
    with anyio.fail_after(PATIENCE_S), pytest.raises(BusUnavailable):
        async with Client("nats://127.0.0.1:1", options=ClientOptions(connect_wait_s=0.3)):
            pass


async def test_a_wrong_token_is_reported_as_refused(cluster: tuple[Stack, str]) -> None:
    address = cluster[1].rpartition("@")[2]
    with pytest.raises(BusPermissionDenied):
        async with Client(f"nats://wrong@{address}", options=QUICK):
            pass


async def test_an_error_of_the_block_comes_out_as_it_is(cluster: tuple[Stack, str]) -> None:
    with pytest.raises(KeyError):
        async with client_of(cluster[1]):
            raise KeyError("the program's own")


async def test_a_cancelled_block_leaves_the_bus(cluster: tuple[Stack, str]) -> None:
    with anyio.move_on_after(0.2) as scope:
        async with client_of(cluster[1]) as client:
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert client.instance


def test_the_client_needs_no_engine() -> None:
    check = "import busllm, sys; busllm.Client; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
