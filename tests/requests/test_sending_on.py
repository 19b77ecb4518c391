"""A part dies in mid-stream; the text is exactly as undisturbed."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from busllm.engine.null import NullSequence
from busllm.errors import BusllmError
from busllm.messages.codec import pack_ids
from busllm.requests.live import LiveRequest
from busllm.sampling import SamplingParams
from busllm.testing.stack import Stack, StackConfig, request
from tests.requests.conftest import World

pytestmark = pytest.mark.anyio

NUM_TOKENS = 200
PATIENCE_S = 30.0


def undisturbed(prompt: str, num_tokens: int = NUM_TOKENS, seed: int = 7) -> str:
    """What the null model answers, by its definition."""
    prompt_ids = pack_ids(np.frombuffer(prompt.encode(), dtype=np.uint8).astype(np.int32))
    sequence = NullSequence(prompt_ids, SamplingParams(), seed, None)
    first = len(prompt_ids) // 4
    return bytes(sequence.token(first + i) for i in range(num_tokens)).decode()


class Reader:
    """Reads requests to their ends, beside the test."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.errors: dict[str, BusllmError] = {}

    async def read(self, prompt: str, live: LiveRequest) -> None:
        self.texts[prompt] = ""
        try:
            async for deltas in live:
                self.texts[prompt] += "".join(delta.text for delta in deltas)
        except BusllmError as error:
            self.errors[prompt] = error


async def disturb(stack: Stack, fault: str, world: World) -> None:
    """Brings a fault about and repairs it as `busllm up` would."""
    if fault == "bus":
        await world.cut()
        await anyio.sleep(0.3)
        await world.mend()
        return
    await stack.kill(fault)
    await stack.start(fault)


async def idle(stack: Stack) -> None:
    """Waits until every stage is back to its baseline."""

    def is_idle() -> bool:
        counts = {name: actor.announcement().statistics for name, actor in stack.actors.items()}
        return (
            counts["owner:0"]["requests"] == 0
            and counts["detokenizer:0"]["open_sequences"] == 0
            and counts["tokenizer:0"]["requests"] == 0
            and counts["scheduler:0"]["sequences"] == 0
            and counts["scheduler:0"]["running"] == counts["scheduler:0"]["waiting"] == 0
            and counts["scheduler:0"]["kv_pages"]["owned"] == 0
        )

    with anyio.fail_after(PATIENCE_S):
        await stack.wait_for(is_idle)


@pytest.mark.parametrize("fault", ["tokenizer:0", "scheduler:0", "detokenizer:0", "bus"])
async def test_a_fault_in_mid_stream_leaves_the_text_as_undisturbed(world: World, fault: str) -> None:
    prompts = [f"prompt number {i}" for i in range(8)]
    reader = Reader()
    with anyio.fail_after(PATIENCE_S):
        async with world.stack(StackConfig(step_time_s=0.004)) as stack:
            async with anyio.create_task_group() as tasks:
                for prompt in prompts:
                    tasks.start_soon(reader.read, prompt, stack.owner.submit(request(prompt, max_tokens=NUM_TOKENS)))
                await stack.wait_for(lambda: all(len(reader.texts.get(prompt, "")) > 20 for prompt in prompts))
                assert any(len(text) < NUM_TOKENS for text in reader.texts.values())
                await disturb(stack, fault, world)
            await idle(stack)
    assert not reader.errors
    assert reader.texts == {prompt: undisturbed(prompt) for prompt in prompts}


@pytest.mark.parametrize("fault", ["tokenizer:0", "scheduler:0", "detokenizer:0"])
async def test_with_two_of_a_kind_the_other_takes_over(world: World, fault: str) -> None:
    prompts = [f"prompt number {i}" for i in range(8)]
    reader = Reader()
    config = StackConfig(step_time_s=0.004, tokenizers=2, schedulers=2, detokenizers=2)
    with anyio.fail_after(PATIENCE_S):
        async with world.stack(config) as stack, anyio.create_task_group() as tasks:
            for prompt in prompts:
                tasks.start_soon(reader.read, prompt, stack.owner.submit(request(prompt, max_tokens=NUM_TOKENS)))
            await stack.wait_for(lambda: all(len(reader.texts.get(prompt, "")) > 20 for prompt in prompts))
            await stack.kill(fault)
    assert not reader.errors
    assert reader.texts == {prompt: undisturbed(prompt) for prompt in prompts}


@pytest.mark.parametrize("kind", ["tokenizer", "scheduler", "detokenizer"])
async def test_requests_sent_while_a_stage_is_dead_end_with_its_name(world: World, kind: str) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with world.stack() as stack:
            await stack.kill(f"{kind}:0")
            with pytest.raises(BusllmError) as raised:
                await stack.generate("hello")
    assert raised.value.status == 503
    assert kind in raised.value.message


async def test_a_bus_that_is_away_for_good_ends_requests_with_bus_unavailable(world: World) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with world.stack() as stack:
            await world.cut()
            await stack.wait_for(lambda: not stack.actors["owner:0"].connection.is_connected)
            with pytest.raises(BusllmError) as raised:
                await stack.generate("hello")
    assert (raised.value.status, raised.value.code) == (503, "bus_unavailable")


async def test_all_choices_of_a_request_go_on(world: World) -> None:
    texts: dict[int, str] = {}
    with anyio.fail_after(PATIENCE_S):
        async with world.stack(StackConfig(step_time_s=0.004)) as stack:
            live = stack.owner.submit(request("choices", n=3, max_tokens=NUM_TOKENS))
            killed = False
            async for deltas in live:
                for delta in deltas:
                    texts[delta.choice] = texts.get(delta.choice, "") + delta.text
                if not killed and len(texts) == 3:
                    killed = True
                    await disturb(stack, "scheduler:0", world)
    assert {choice: len(text) for choice, text in texts.items()} == dict.fromkeys(range(3), NUM_TOKENS)
    assert texts[0] == undisturbed("choices")
    assert len(set(texts.values())) == 3
