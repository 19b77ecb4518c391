"""An abort at any point of a request's way brings every stage back to its baseline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from busllm.bus.subjects import Subjects
from busllm.engine.engine import EngineConfig
from busllm.errors import Aborted
from busllm.requests.live import LiveRequest
from busllm.testing.stack import Stack, StackConfig, request
from tests.requests.conftest import World
from tests.requests.test_sending_on import PATIENCE_S, idle, undisturbed

pytestmark = pytest.mark.anyio

SLOW = StackConfig(
    step_time_s=0.01, engine=EngineConfig(num_pages=4096, max_running=4, step_tokens=16, max_context_tokens=100_000)
)
LONG_PROMPT = "x" * 2000  # 125 steps of prefill


def trace_names(stack: Stack, uid: str) -> set[str]:
    return {event.event for actor in stack.actors.values() for event in actor.trace.events_of(uid)}


async def nothing_seen_yet(stack: Stack, live: LiveRequest) -> None:
    """Aborted in the same breath as it was sent: the abort may overtake the request."""


async def waiting(stack: Stack, live: LiveRequest) -> None:
    await stack.wait_for(lambda: "queued" in trace_names(stack, live.uid))


async def mid_prefill(stack: Stack, live: LiveRequest) -> None:
    await stack.wait_for(lambda: "admitted" in trace_names(stack, live.uid))
    assert "first_token" not in trace_names(stack, live.uid)


async def mid_decode(stack: Stack, live: LiveRequest) -> None:
    await stack.wait_for(lambda: live.has_text)


Point = Callable[[Stack, LiveRequest], Awaitable[None]]


@pytest.mark.parametrize("how", ["client left", "bare publish"])
@pytest.mark.parametrize("point", [nothing_seen_yet, mid_prefill, mid_decode])
async def test_after_an_abort_everything_is_back_to_baseline(world: World, point: Point, how: str) -> None:
    prompt = LONG_PROMPT if point is mid_prefill else "short"
    with anyio.fail_after(PATIENCE_S):
        async with world.stack(SLOW) as stack:
            live = stack.owner.submit(request(prompt, max_tokens=5000, n=2))
            await point(stack, live)
            await end(stack, live.uid, how)
            with pytest.raises(Aborted):
                async for _ in live:
                    pass
            await idle(stack)
            assert await stack.generate("after", max_tokens=20) == undisturbed("after", 20)


async def end(stack: Stack, uid: str, how: str) -> None:
    if how == "client left":
        stack.owner.abort(uid)
        return
    anyone = await stack._bus.connect(name="anyone", inbox="inbox.anyone")
    anyone.publish(Subjects("test").abort(uid), b"")
    await anyone.close()


async def test_a_waiting_request_is_aborted_and_the_running_ones_are_not(world: World) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with world.stack(SLOW) as stack:
            running = [stack.owner.submit(request(f"running {i}", max_tokens=100)) for i in range(4)]
            await stack.wait_for(lambda: all(live.has_text for live in running))
            queued = stack.owner.submit(request("queued", max_tokens=100))
            await waiting(stack, queued)
            stack.owner.abort(queued.uid)
            texts = []
            for live in running:
                text = ""
                async for deltas in live:
                    text += "".join(delta.text for delta in deltas)
                texts.append(text)
            assert texts == [undisturbed(f"running {i}", 100) for i in range(4)]
            assert "admitted" not in trace_names(stack, queued.uid)
            await idle(stack)


async def test_an_abort_after_the_last_token_does_nothing(world: World) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with world.stack() as stack:
            live = stack.owner.submit(request("done", max_tokens=10))
            text = ""
            async for deltas in live:
                text += "".join(delta.text for delta in deltas)
            await end(stack, live.uid, "bare publish")
            await idle(stack)
            assert text == undisturbed("done", 10)


async def test_a_stop_string_is_no_abort(world: World) -> None:
    expected = undisturbed("stop here", 64)
    with anyio.fail_after(PATIENCE_S):
        async with world.stack() as stack:
            live = stack.owner.submit(request("stop here", max_tokens=64, stop=(expected[20:23],)))
            text, reasons, tokens = "", [], []
            async for deltas in live:
                for delta in deltas:
                    text += delta.text
                    reasons.append(delta.finish_reason)
                    tokens += [delta.usage.completion_tokens] if delta.usage else []
            await idle(stack)
    assert text == expected[:20]
    assert reasons[-1] == "stop"
    assert tokens == [23]


async def test_a_stop_token_ends_the_text_and_is_no_part_of_it(world: World) -> None:
    expected = undisturbed("stop token", 64)
    stop_token = ord(expected[30])
    with anyio.fail_after(PATIENCE_S):
        async with world.stack() as stack:
            text = await stack.generate("stop token", max_tokens=64, stop_token_ids=(stop_token,))
    assert text == expected[: expected.index(chr(stop_token))]


async def test_what_was_computed_before_an_abort_stays_in_the_prefix_cache(world: World) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with world.stack(SLOW) as stack:
            live = stack.owner.submit(request(LONG_PROMPT, max_tokens=10))
            await mid_prefill(stack, live)
            await stack.wait_for(lambda: stack.actors["scheduler:0"].announcement().statistics["steps"] > 30)
            stack.owner.abort(live.uid)
            await idle(stack)
            assert stack.actors["scheduler:0"].announcement().statistics["kv_pages"]["cached"] >= 20
