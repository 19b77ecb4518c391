"""Models, tokenizing, health, metrics and the OpenAPI document."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from busllm.errors import StageMissing
from busllm.messages.control import Announcement, StageState
from busllm.stages.frontend import bodies
from busllm.testing.fake_owner import FakeOwner
from busllm.testing.frontend_server import MODEL, fake_settings, serving
from busllm.testing.http_oracles import check_error

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", [f"/v1/models/{MODEL}", f"/v1/models/{MODEL.replace('/', '%2F')}"])
async def test_a_model_is_shown_by_its_id_slashes_and_all(path: str) -> None:
    async with serving(FakeOwner()) as server:
        one = await server.client.get(path)
        listed = (await server.client.get("/v1/models")).json()
    assert one.json() == {
        "id": MODEL, "object": "model", "created": 1, "owned_by": "busllm", "max_model_len": 8192,
    }  # fmt: skip
    assert listed == {"object": "list", "data": [one.json()]}


async def test_an_unknown_model_is_404() -> None:
    async with serving(FakeOwner()) as server:
        answer = await server.client.get("/v1/models/nope/x")
    check_error(answer.status_code, answer.headers, answer.content, code="model_not_found")
    assert answer.status_code == 404


async def test_before_all_stages_are_up_health_is_200_and_the_rest_503_with_the_reason() -> None:
    owner = FakeOwner()
    owner.unready = "the scheduler loads the model (40 %)"
    owner.refusal = StageMissing("scheduler", "it loads the model")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    async with serving(owner) as server:
        assert (await server.client.get("/health")).json() == {"status": "ok"}
        for path in ("/ready", "/v1/models", f"/v1/models/{MODEL}"):
            answer = await server.client.get(path)
            assert answer.status_code == 503
            error = check_error(503, answer.headers, answer.content)
            assert "40 %" in error["message"]
            assert "retry-after" in answer.headers
        assert "busllm_http_requests_total" in (await server.client.get("/metrics")).text
        for stream in (True, False):
            answer = await server.client.post("/v1/chat/completions", json={**chat, "stream": stream})
            check_error(answer.status_code, answer.headers, answer.content, code="stage_unavailable")
        owner.unready = owner.refusal = None
        assert (await server.client.get("/ready")).status_code == 200
        assert (await server.client.post("/v1/chat/completions", json=chat)).status_code == 200


async def test_a_text_is_tokenized_and_back() -> None:
    async with serving(FakeOwner()) as server:
        answer = await server.client.post("/tokenize", json={"model": MODEL, "prompt": "héé"})
        tokens = answer.json()
        back = await server.client.post("/detokenize", json={"tokens": tokens["tokens"]})
        chat = await server.client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})
        nothing = await server.client.post("/detokenize", json={"tokens": []})
    assert tokens == {"tokens": list("héé".encode()), "count": 5, "max_model_len": 8192}
    assert back.json() == {"prompt": "héé"}
    assert chat.json()["tokens"] == list(b"<|user|>x")
    assert nothing.json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": "x", "unknown": 1}, "unknown"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
async def test_bad_tokenizer_questions_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    async with serving(FakeOwner()) as server:
        answer = await server.client.post(path, json=body)
    assert answer.status_code == 400
    check_error(400, answer.headers, answer.content, param=param)


async def test_metrics_count_requests_tokens_and_what_stages_announce() -> None:
    owner = FakeOwner()
    owner.announced = [
        Announcement(
            "scheduler", 0, "scheduler-0-abcdefgh", "host", 1, StageState.READY,
            load={"waiting": 2},
            statistics={"running": 3, "kv_pages": {"total": 64, "free": 60}, "attention": "cpu (int4)"},
        )
    ]  # fmt: skip
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "n": 2}
    async with serving(owner) as server:
        await server.client.post("/v1/chat/completions", json=body)
        await server.client.post("/v1/chat/completions", json={**body, "stream": True})
        await server.client.post("/v1/chat/completions", json={**body, "n": 0})
        await server.client.get("/nope")
        answer = await server.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = set(answer.text.splitlines())
    chat = 'endpoint="/v1/chat/completions"'
    assert f'busllm_http_requests_total{{{chat},status="200"}} 2.0' in lines
    assert f'busllm_http_requests_total{{{chat},status="400"}} 1.0' in lines
    assert 'busllm_http_requests_total{endpoint="other",status="404"} 1.0' in lines
    assert "busllm_http_requests_in_flight 1.0" in lines
    assert "busllm_completion_tokens_total 28.0" in lines
    assert f"busllm_prompt_tokens_total {2.0 * len('<|user|>x')}" in lines
    assert "busllm_time_to_first_token_seconds_count 2.0" in lines
    assert "busllm_inter_token_seconds_count 24.0" in lines
    assert f"busllm_http_request_seconds_count{{{chat}}} 3.0" in lines
    labels = 'instance="scheduler-0-abcdefgh"'
    assert f'busllm_scheduler_kv_pages{{{labels},part="free"}} 60.0' in lines
    assert f'busllm_scheduler_running{{{labels},part=""}} 3.0' in lines
    assert f'busllm_scheduler_waiting{{{labels},part=""}} 2.0' in lines
    assert f'busllm_stage{{index="0",{labels},kind="scheduler",state="ready"}} 1.0' in lines
    assert f'busllm_scheduler_attention_info{{{labels},value="cpu (int4)"}} 1.0' in lines


async def test_two_frontends_in_one_process_count_apart() -> None:
    async with serving(FakeOwner()) as first, serving(FakeOwner(), fake_settings()) as second:
        await first.client.get("/health")
        seen = (await second.client.get("/metrics")).text
    assert 'endpoint="/health"' not in seen


async def test_the_openapi_document_shows_every_endpoint_and_every_field() -> None:
    async with serving(FakeOwner()) as server:
        document = (await server.client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{id}", "/tokenize", "/detokenize",
        "/health", "/ready", "/metrics", "/openapi.json",
    }  # fmt: skip
    schemas = document["components"]["schemas"]
    for body in (bodies.ChatBody, bodies.CompletionBody, bodies.TokenizeBody, bodies.DetokenizeBody):
        schema = schemas[body.__name__]
        fields = msgspec.structs.fields(body)
        assert set(schema["properties"]) == {field.name for field in fields}
        assert set(schema["required"]) == {field.name for field in fields if field.required} or not schema["required"]
    assert schemas["ChatBody"]["properties"]["temperature"]["maximum"] == 2
    references = {word for word in json.dumps(document).split('"') if word.startswith("#/components/schemas/")}
    assert references <= {f"#/components/schemas/{name}" for name in schemas}
