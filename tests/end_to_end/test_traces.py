"""What anyone with a stock NATS client sees of a request."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import nats
import pytest
from openai import AsyncOpenAI

from tests.end_to_end.cluster import Cluster
from tests.end_to_end.conftest import MODEL

pytestmark = pytest.mark.anyio

PATH = [
    ("frontend", "received"),
    ("tokenizer", "tokenized"),
    ("scheduler", "queued"),
    ("scheduler", "admitted"),
    ("scheduler", "prefilled"),
    ("scheduler", "first_token"),
    ("frontend", "first_text"),
    ("scheduler", "finished"),
    ("detokenizer", "finished"),
    ("frontend", "finished"),
]
SECRET = "zanzibar"


async def test_a_ten_line_subscriber_sees_a_request_on_its_way(cluster: Cluster, client: AsyncOpenAI) -> None:
    if cluster.bus_url is None:
        pytest.skip("a memory bus cannot be reached from outside")
    watcher = await nats.connect(cluster.bus_url)
    heard: list[tuple[str, dict[str, Any]]] = []

    async def hear(message: Any) -> None:
        heard.append((message.subject, json.loads(message.data)))

    await watcher.subscribe("busllm.local.trace.>", cb=hear)
    await watcher.flush()
    messages: list[Any] = [{"role": "user", "content": f"Is {SECRET} an island?"}]
    answer = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6, temperature=0)
    await cluster.idle()
    await watcher.flush()
    await watcher.close()

    uid = answer.id.removeprefix("chatcmpl-")
    assert {event["uid"] for _, event in heard} == {uid}
    check_order([(event["stage"], event["event"]) for _, event in heard])
    for subject, event in heard:
        assert subject == f"busllm.local.trace.{uid}.{event['stage']}.{event['event']}"
        assert set(event) == {"uid", "stage", "instance", "event", "at", "elapsed_ms", "data"}
        assert event["at"].endswith("Z")
        assert datetime.fromisoformat(event["at"]).utcoffset() is not None
        assert event["elapsed_ms"] >= 0
        assert SECRET not in json.dumps(event).lower()
    check_data({(event["stage"], event["event"]): event["data"] for _, event in heard}, answer.usage)


def check_order(seen: list[tuple[str, str]]) -> None:
    """Each stage tells its own events in order; of two stages, what causes the other comes first."""
    assert sorted(seen) == sorted(PATH)
    for stage in {stage for stage, _ in PATH}:
        assert [event for event in seen if event[0] == stage] == [event for event in PATH if event[0] == stage]
    causes = [PATH[0], PATH[1], PATH[3], PATH[6]]
    assert [event for event in seen if event in causes] == causes


def check_data(data: dict[tuple[str, str], dict[str, Any]], usage: Any) -> None:
    assert data["tokenizer", "tokenized"]["prompt_tokens"] == usage.prompt_tokens
    assert data["scheduler", "admitted"]["prompt_tokens"] == usage.prompt_tokens
    assert 0 <= data["scheduler", "admitted"]["cached_tokens"] < usage.prompt_tokens
    assert data["detokenizer", "finished"]["tokens"] == usage.completion_tokens
    assert data["detokenizer", "finished"]["reason"] in ("stop", "length")
    assert data["frontend", "finished"]["completion_tokens"] == usage.completion_tokens
    for event in ("queued", "admitted", "prefilled", "first_token", "finished"):
        assert data["scheduler", event]["choice"] == 0
