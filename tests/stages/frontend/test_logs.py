"""What a frontend logs of its exchanges: which stage and instance it is, and the uid."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest
from structlog.testing import capture_logs

from busllm.actors.actor import Actor
from busllm.actors.clock import SystemClock
from busllm.actors.settings import ActorSettings
from busllm.bus.memory import MemoryBus
from busllm.requests.generation import GenerationRequest
from busllm.requests.owner import RequestOwner
from busllm.stages.frontend.stage import FrontendStage
from busllm.testing.fake_owner import FakeOwner
from busllm.testing.frontend_server import fake_settings, serving
from busllm.topology.address import Address, bind

pytestmark = pytest.mark.anyio


def lines(logs: list[Any], event: str) -> list[Any]:
    return [line for line in logs if line["event"] == event]


async def test_lines_say_which_instance_it_is_as_soon_as_there_is_one() -> None:
    listener = bind(Address("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stage, hurry = FrontendStage(fake_settings(), [listener], RequestOwner(10)), anyio.Event()
    actor = Actor(stage, 0, MemoryBus(), ActorSettings("test", "here"), SystemClock())
    with capture_logs() as logs:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client, anyio.create_task_group() as tasks:
            await tasks.start(stage.serve_http, hurry)
            early = await client.get("/nowhere")
            tasks.start_soon(actor.run)
            await actor.ready.wait()
            late = await client.get("/nowhere")
            actor.stop()
    before, after = lines(logs, "request refused")
    assert (before["stage"], before["uid"], before.get("instance")) == ("frontend", early.headers["x-request-id"], None)
    assert (after["stage"], after["uid"], after["instance"]) == (
        "frontend",
        late.headers["x-request-id"],
        actor.instance,
    )
    (drain,) = lines(logs, "drain began")
    assert (drain["stage"], drain["instance"]) == ("frontend", actor.instance)


async def test_a_handler_that_fails_is_logged_with_its_request() -> None:
    def script(request: GenerationRequest) -> Any:
        raise ZeroDivisionError("a bug")

    with capture_logs() as logs:
        async with serving(FakeOwner(script)) as server:
            answer = await server.client.post(
                "/v1/chat/completions",
                json={"model": fake_settings().model_name, "messages": [{"role": "user", "content": "x"}]},
            )
    assert answer.status_code == 500
    (line,) = lines(logs, "request handler failed")
    assert (line["stage"], line["uid"]) == ("frontend", answer.headers["x-request-id"])
