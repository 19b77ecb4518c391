"""One stage alone loses the bus and comes back, while all others stay connected."""

from __future__ import annotations

import anyio
import pytest

from busllm.testing.faulty_bus import FaultyBus
from busllm.testing.stack import Stack, StackConfig, request, running_stack
from tests.requests.test_sending_on import PATIENCE_S, Reader, idle, undisturbed

pytestmark = pytest.mark.anyio

NAMES = ["owner:0", "tokenizer:0", "scheduler:0", "detokenizer:0"]
NUM_TOKENS = 600


async def away(stack: Stack, name: str, seconds: float) -> None:
    connection = stack.actors[name].connection
    connection.lose("reset by peer")  # type: ignore[attr-defined]
    await anyio.sleep(seconds)
    connection.come_back(seconds)  # type: ignore[attr-defined]


@pytest.mark.parametrize("seconds", [0.05, 0.6])
@pytest.mark.parametrize("name", NAMES)
async def test_the_text_is_as_undisturbed(name: str, seconds: float) -> None:
    prompts = [f"prompt number {i}" for i in range(4)]
    reader = Reader()
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(FaultyBus(), StackConfig(step_time_s=0.002)) as stack:
            async with anyio.create_task_group() as tasks:
                for prompt in prompts:
                    tasks.start_soon(reader.read, prompt, stack.owner.submit(request(prompt, max_tokens=NUM_TOKENS)))
                await stack.wait_for(lambda: all(len(reader.texts.get(prompt, "")) > 50 for prompt in prompts))
                assert all(len(text) < NUM_TOKENS for text in reader.texts.values())
                await away(stack, name, seconds)
            await idle(stack)
    assert not reader.errors
    assert reader.texts == {prompt: undisturbed(prompt, NUM_TOKENS) for prompt in prompts}


@pytest.mark.parametrize("name", NAMES)
async def test_an_abort_that_it_missed_takes_effect_all_the_same(name: str) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(FaultyBus(), StackConfig(step_time_s=0.002)) as stack:
            live = stack.owner.submit(request("left", max_tokens=50_000))
            await stack.wait_for(lambda: live.has_text)
            connection = stack.actors[name].connection
            connection.lose("reset by peer")  # type: ignore[attr-defined]
            stack.owner.abort(live.uid)
            connection.come_back(0.1)  # type: ignore[attr-defined]
            await idle(stack)


async def test_a_lost_part_of_a_request_is_noticed_while_another_part_talks() -> None:
    """Two prompts: the second one's message to the scheduler is lost; the first one's answer is long."""
    bus = FaultyBus()
    async with running_stack(bus, StackConfig(step_time_s=0.002)) as stack:
        scheduler = stack.actors["scheduler:0"]
        stage = scheduler._behaviour
        take, lost = stage._take, []  # type: ignore[attr-defined]

        def lose_second(generate: object) -> None:
            if not lost and generate.choices[0].choice == 1:  # type: ignore[attr-defined]
                lost.append(generate)
            else:
                take(generate)

        stage._take = lose_second  # type: ignore[attr-defined]
        both = request("first", max_tokens=2000)
        two_prompts = type(both)((*both.prompts, *request("second").prompts), both.params)
        live = stack.owner.submit(two_prompts)
        with anyio.fail_after(PATIENCE_S):
            await stack.wait_for(lambda: len(live.choices[1].output_ids) > 0)
        assert lost
        assert not live.choices[0].finished, "it was noticed long before the other part had ended"
        stack.owner.abort(live.uid)
