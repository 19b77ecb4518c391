"""What each level of tracing tells of a request, from all stages."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import anyio
import pytest

from busllm.bus.protocol import Message
from busllm.engine.engine import EngineConfig
from busllm.errors import Aborted, BusllmError
from busllm.telemetry.trace import TraceLevel
from busllm.testing.faulty_bus import FaultyBus
from busllm.testing.stack import StackConfig, request, running_stack
from tests.requests.test_sending_on import PATIENCE_S, undisturbed

pytestmark = pytest.mark.anyio

SMALL = EngineConfig(
    num_pages=12, page_tokens=16, max_running=8, max_context_tokens=190, prefix_cache=False, expected_output_tokens=8
)

ONE_REQUEST = {
    ("client", "received"): {"prompts", "n"},
    ("tokenizer", "tokenized"): {"prompt_tokens", "scheduler"},
    ("scheduler", "queued"): {"choice"},
    ("scheduler", "admitted"): {"choice", "prompt_tokens", "cached_tokens"},
    ("scheduler", "prefilled"): {"choice"},
    ("scheduler", "first_token"): {"choice"},
    ("scheduler", "finished"): {"choice"},
    ("detokenizer", "finished"): {"choice", "reason", "tokens"},
    ("client", "first_text"): set(),
    ("client", "finished"): {"completion_tokens", "attempts"},
}


class Watcher:
    """Somebody who listens to all traces."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    async def watch(self, bus: FaultyBus) -> None:
        connection = await bus.connect(name="watcher", inbox="inbox.watcher")
        await connection.subscribe("busllm.test.trace.>")
        while True:
            for item in await connection.receive():
                if isinstance(item, Message):
                    event = json.loads(item.payload)
                    assert item.subject == f"busllm.test.trace.{event['uid']}.{event['stage']}.{event['event']}"
                    self.events.append(event)

    def of(self, stage: str, event: str) -> list[dict[str, Any]]:
        """The data of every event of that name."""
        return [one["data"] for one in self.events if (one["stage"], one["event"]) == (stage, event)]

    def names(self) -> Counter[tuple[str, str]]:
        return Counter((one["stage"], one["event"]) for one in self.events)


async def watched(config: StackConfig, work: Any) -> Watcher:
    """Runs a stack with a watcher while some work is done."""
    bus, watcher = FaultyBus(), Watcher()
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watcher.watch, bus)
            async with running_stack(bus, config) as stack:
                await work(stack, watcher)
            tasks.cancel_scope.cancel()
    return watcher


async def one(stack: Any, watcher: Watcher) -> None:
    await stack.generate("trace me", max_tokens=5)
    if stack.actors["owner:0"].trace.level is not TraceLevel.OFF:
        await stack.wait_for(lambda: ("client", "finished") in watcher.names())
        await stack.wait_for(lambda: ("scheduler", "finished") in watcher.names())


async def test_every_event_of_a_request_is_told_once_with_its_data() -> None:
    watcher = await watched(StackConfig(), one)
    assert watcher.names() == Counter(dict.fromkeys(ONE_REQUEST, 1))
    for (stage, event), keys in ONE_REQUEST.items():
        (data,) = watcher.of(stage, event)
        assert keys <= set(data), (stage, event, data)
    assert "trace me" not in json.dumps(watcher.events)
    assert undisturbed("trace me", 5) not in json.dumps(watcher.events)


async def test_at_level_off_nothing_is_told_nor_remembered() -> None:
    async def work(stack: Any, watcher: Watcher) -> None:
        await one(stack, watcher)
        assert all(actor.trace.latest(10) == [] for actor in stack.actors.values())

    watcher = await watched(StackConfig(trace_level=TraceLevel.OFF), work)
    assert watcher.events == []


async def test_at_level_tokens_the_ids_of_all_deltas_are_the_answer() -> None:
    watcher = await watched(StackConfig(trace_level=TraceLevel.TOKENS), one)
    deltas = watcher.of("client", "delta")
    ids = [token_id for delta in deltas for token_id in delta["token_ids"]]
    assert bytes(ids).decode() == undisturbed("trace me", 5)
    assert {delta["choice"] for delta in deltas} == {0}
    assert watcher.names() - Counter({("client", "delta"): len(deltas)}) == Counter(dict.fromkeys(ONE_REQUEST, 1))


async def test_an_abort_is_told_by_who_held_the_request() -> None:
    async def work(stack: Any, watcher: Watcher) -> None:
        live = stack.owner.submit(request("trace me", max_tokens=5000))
        await stack.wait_for(lambda: live.has_text)
        stack.owner.abort(live.uid)
        with pytest.raises(Aborted):
            async for _ in live:
                pass
        await stack.wait_for(lambda: watcher.of("scheduler", "aborted"))

    watcher = await watched(StackConfig(step_time_s=0.005), work)
    assert watcher.of("client", "aborted") == [{"attempts": 1}]
    assert [data["choice"] for data in watcher.of("scheduler", "aborted")] == [0]
    assert not watcher.of("client", "finished")


async def test_a_failure_is_told_with_its_code() -> None:
    async def work(stack: Any, watcher: Watcher) -> None:
        with pytest.raises(BusllmError):
            await stack.generate("", max_tokens=5)
        await stack.wait_for(lambda: watcher.of("client", "failed"))

    watcher = await watched(StackConfig(), work)
    assert watcher.of("client", "failed") == [{"code": "invalid_value", "attempts": 1}]
    assert watcher.of("tokenizer", "failed") == [{"code": "invalid_value"}]


async def test_a_retraction_is_told() -> None:
    """Two answers that do not fit at once: the younger goes back to the queue, and both are whole in the end."""

    async def work(stack: Any, watcher: Watcher) -> None:
        texts: dict[str, str] = {}

        async def ask(prompt: str) -> None:
            texts[prompt] = await stack.generate(prompt, max_tokens=120)

        async with anyio.create_task_group() as tasks:
            for prompt in ("one", "two"):
                tasks.start_soon(ask, prompt)
        assert texts == {prompt: undisturbed(prompt, 120) for prompt in ("one", "two")}

    watcher = await watched(StackConfig(engine=SMALL), work)
    assert watcher.of("scheduler", "retracted")
    assert len(watcher.of("scheduler", "finished")) == 2


async def test_sending_on_is_told_with_its_reason() -> None:
    async def work(stack: Any, watcher: Watcher) -> None:
        live = stack.owner.submit(request("trace me", max_tokens=200))
        await stack.wait_for(lambda: live.has_text)
        await stack.kill("scheduler:0")
        await stack.start("scheduler:0")
        async for _ in live:
            pass

    watcher = await watched(StackConfig(step_time_s=0.004), work)
    (sent_on, *_) = watcher.of("client", "sent_on")
    assert sent_on["attempt"] == 2
    assert sent_on["reason"]
