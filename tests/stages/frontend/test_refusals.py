"""Bad requests: one envelope, the field's name, and the same answer streamed and not."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from busllm.errors import Aborted, BusDown, BusUnavailable, NeverFits, PayloadTooLarge, QueueFull, StageMissing
from busllm.testing.fake_owner import FakeOwner, say
from busllm.testing.frontend_server import MODEL, FrontendServer, fake_settings, serving
from busllm.testing.http_oracles import check_error

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
VOCAB_SIZE = 259

SHARED: list[tuple[str, str]] = [
    # the JSON value of a field, and the parameter that the error names
    *[(f'"max_tokens":{value}', "max_tokens") for value in ("-1", "-5", "1.5", "true", '"7"', str(2**63), "1e400")],
    *[(f'"temperature":{value}', "temperature") for value in ("-0.1", "2.1", '"0"', "true", "1e999", "[]")],
    *[(f'"top_p":{value}', "top_p") for value in ("1.0001", "-0.1", "1e999", '"1"')],
    *[(f'"min_p":{value}', "min_p") for value in ("-1", "1.1", "1e999")],
    *[(f'"top_k":{value}', "top_k") for value in ("-2", "1.5", "true")],
    *[(f'"presence_penalty":{value}', "presence_penalty") for value in ("2.1", "-2.1", "1e999")],
    *[(f'"frequency_penalty":{value}', "frequency_penalty") for value in ("2.1", "-2.1", "-1e999")],
    *[(f'"repetition_penalty":{value}', "repetition_penalty") for value in ("0", "-1", "1e999")],
    *[(f'"n":{value}', "n") for value in ("0", "-1", "1.5", "true", '"2"', "129")],
    *[(f'"stop":{value}', "stop") for value in ('""', '[""]', '["END",""]', "[3]", '{"a":1}', json.dumps(["x"] * 17))],
    *[(f'"stream":{value}', "stream") for value in ('"true"', '"false"', "1", "0")],
    *[(f'"logit_bias":{value}', "logit_bias") for value in (
        f'{{"{VOCAB_SIZE}":1}}', '{"999999":1}', '{"-1":1}', '{"abc":1}', '{"1.0":1}', '{"":1}', '{"01":1}',
        '{"1":101}', '{"1":-101}', '{"1":null}', '{"1":"5"}', "[1]", "5",
    )],
    *[(f'"stop_token_ids":{value}', "stop_token_ids") for value in (f"[{VOCAB_SIZE + 7}]", "[-1]", "[1.5]", '"1"')],
    *[(f'"seed":{value}', "seed") for value in (str(2**63), "1.5", '"1"', "true")],
    ('"min_tokens":9,"max_tokens":8', "min_tokens"),
    ('"min_tokens":-1', "min_tokens"),
    ('"ignore_eos":"yes"', "ignore_eos"),
    ('"stream_options":{"include_usage":true}', "stream_options"),
    ('"stream":true,"stream_options":{"include_usage":"yes"}', "stream_options.include_usage"),
    ('"stream":true,"stream_options":{"include":true}', "stream_options.include"),
    ('"response_format":{"type":"nonsense"}', "response_format.type"),
    ('"response_format":{}', "response_format.type"),
    ('"response_format":"json_object"', "response_format"),
    ('"response_format":{"type":"json_schema"}', "response_format.json_schema"),
    ('"response_format":{"type":"json_object","json_schema":{"schema":{}}}', "response_format.json_schema"),
    ('"response_format":{"type":"json_schema","json_schema":{"name":"x"}}', "response_format.json_schema.schema"),
    ('"response_format":{"type":"json_schema","json_schema":{"schema":[]}}', "response_format.json_schema.schema"),
    ('"structured_outputs":{}', "structured_outputs"),
    ('"structured_outputs":{"json_object":false}', "structured_outputs"),
    ('"structured_outputs":{"regex":"a","choice":["b"]}', "structured_outputs"),
    ('"structured_outputs":{"choice":"a"}', "structured_outputs.choice"),
    ('"structured_outputs":{"choices":["a"]}', "structured_outputs.choices"),
    ('"structured_outputs":{"regex":"a"},"response_format":{"type":"json_object"}', "structured_outputs"),
    ('"temprature":0', "temprature"),
    ('"model":null', "model"),
]  # fmt: skip

CHAT_ONLY: list[tuple[str, str]] = [
    ('"max_tokens":0', "max_tokens"),
    ('"max_completion_tokens":0', "max_completion_tokens"),
    ('"max_completion_tokens":4,"max_tokens":9', "max_completion_tokens"),
    *[(f'"logprobs":true,"top_logprobs":{value}', "top_logprobs") for value in ("21", "259", "1000000", "-1", "true")],
    ('"top_logprobs":2', "top_logprobs"),
    ('"logprobs":false,"top_logprobs":2', "top_logprobs"),
    ('"logprobs":1', "logprobs"),
    ('"tools":[{"type":"function"}]', "tools"),
    ('"tool_choice":"required"', "tool_choice"),
    ('"functions":[{}]', "functions"),
    ('"audio":{"voice":"x"}', "audio"),
    ('"modalities":["text","audio"]', "modalities"),
    ('"chat_template_kwargs":{"bos_token":"x"}', "chat_template_kwargs"),
    ('"chat_template_kwargs":{"x":123456789012345678901234567890}', "chat_template_kwargs"),
    *[(f'"messages":{value}', "messages") for value in ("[]", "null", '"hi"', "[1]", '{"role":"user"}')],
    *[
        (f'"messages":[{{"role":{value},"content":"x"}}]', "messages[0].role")
        for value in ('"wizard"', '""', "null", "7")
    ],
    *[
        (f'"messages":[{{"role":"user","content":{value}}}]', "messages[0].content")
        for value in ("null", "[]", "7", "{}")
    ],
    ('"messages":[{"role":"user"}]', "messages[0].content"),
    ('"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]', "messages[0].content[0]"),
    ('"messages":[{"role":"user","content":[{"type":"text","text":7}]}]', "messages[0].content[0].text"),
]  # fmt: skip

COMPLETIONS_ONLY: list[tuple[str, str]] = [
    ('"max_tokens":0', "max_tokens"),
    *[(f'"logprobs":{value}', "logprobs") for value in ("21", "1000000", "-1", "true", '"5"')],
    ('"best_of":3', "best_of"),
    ('"suffix":"x"', "suffix"),
    ('"echo":"yes"', "echo"),
    *[(f'"prompt":{value}', "prompt") for value in (
        "[]", "[[]]", "null", "7", "{}", '["a",1]', '[1,"a"]', "[1,true]", "[[1],2]", "[1.5]", f"[{VOCAB_SIZE}]",
        "[-1]", '["ok",[1]]', "[123456789012345678901234567890]",
    )],
    ('"messages":[]', "messages"),
]  # fmt: skip

NOT_JSON = [
    b"", b"{", b"[]", b"null", b"true", b'"x"', b'{"model":"m",}', b'{"model":"m"}{}', b"{'model':'m'}",
    b'{"model":"m" /* no */}', b'{"model":"\xff"}', b"[" * 100_000, b'{"user":' + b"[" * 100_000,
]  # fmt: skip


def body_of(path: str, fields: str, *, stream: bool) -> bytes:
    defaults = {"model": json.dumps(MODEL)}
    if path == CHAT:
        defaults["messages"] = '[{"role":"user","content":"x"}]'
    else:
        defaults["prompt"] = '"x"'
    rest = ",".join(f'"{name}":{value}' for name, value in defaults.items() if f'"{name}":' not in fields)
    if stream and '"stream"' not in fields:
        rest += ',"stream":true'
    return f"{{{fields},{rest}}}".encode()


async def post(server: FrontendServer, path: str, raw: bytes) -> Any:
    return await server.client.post(path, content=raw, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("path", "cases"),
    [(CHAT, SHARED), (COMPLETIONS, SHARED), (CHAT, CHAT_ONLY), (COMPLETIONS, COMPLETIONS_ONLY)],
    ids=["chat, shared", "completions, shared", "chat", "completions"],
)
async def test_each_bad_field_is_named_streamed_and_not(path: str, cases: list[tuple[str, str]]) -> None:
    owner = FakeOwner()
    async with serving(owner) as server:
        for fields, param in cases:
            plain = await post(server, path, body_of(path, fields, stream=False))
            assert plain.status_code == 400, (fields, plain.text)
            error = check_error(400, plain.headers, plain.content)
            assert error["param"] == param, (fields, error)
            if "stream_options" not in fields:
                streamed = await post(server, path, body_of(path, fields, stream=True))
                assert streamed.status_code == 400, fields
                assert streamed.json()["error"] == error, fields
    assert owner.submitted == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
async def test_numbers_that_json_does_not_have_are_refused(path: str, value: str) -> None:
    async with serving(FakeOwner()) as server:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            answer = await post(server, path, body_of(path, f'"{name}":{value}', stream=False))
            check_error(answer.status_code, answer.headers, answer.content)
            assert answer.status_code == 400


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
async def test_a_body_that_is_no_json_object_is_refused(path: str) -> None:
    async with serving(FakeOwner()) as server:
        for raw in NOT_JSON:
            answer = await post(server, path, raw)
            assert answer.status_code == 400, raw[:50]
            check_error(answer.status_code, answer.headers, answer.content)


@pytest.mark.parametrize("half", ["\\ud800", "\\udc00 x", "ok \\ud83d"])
async def test_half_a_surrogate_pair_is_refused_wherever_it_stands(half: str) -> None:
    messages = '"messages":[{{"role":"{}","content":"{}"}}]'
    async with serving(FakeOwner()) as server:
        for fields in (
            messages.format("user", half), messages.format(half, "x"), f'"stop":"{half}"', f'"user":"{half}"',
            f'"model":"{half}"', f'"{half}":1',
        ):  # fmt: skip
            answer = await post(server, CHAT, body_of(CHAT, fields, stream=False))
            error = check_error(answer.status_code, answer.headers, answer.content)
            assert answer.status_code == 400
            assert "surrogate" in error["message"]
        whole = await post(server, CHAT, body_of(CHAT, messages.format("user", "\\ud83d\\ude00"), stream=False))
    assert whole.status_code == 200


async def test_a_misspelt_field_is_told_its_nearest_right_name() -> None:
    async with serving(FakeOwner()) as server:
        answer = await post(server, CHAT, body_of(CHAT, '"temprature":0', stream=False))
    assert "Did you mean 'temperature'?" in answer.json()["error"]["message"]


async def test_the_last_of_two_equal_keys_counts() -> None:
    owner = FakeOwner()
    async with serving(owner) as server:
        await post(server, CHAT, body_of(CHAT, '"max_tokens":3,"max_tokens":4', stream=False))
    assert owner.submitted[0].params.max_tokens == 4


@pytest.mark.parametrize(
    "name", ["nope-1", "", f"{MODEL} ", MODEL.upper(), "x" * 10_000, "a b", "*", ">", "a\r\nPUB x"]
)
async def test_another_models_name_is_not_served(name: str) -> None:
    owner = FakeOwner()
    async with serving(owner) as server:
        for path in (CHAT, COMPLETIONS):
            answer = await post(server, path, body_of(path, f'"model":{json.dumps(name)}', stream=False))
            assert answer.status_code == 404
            error = check_error(404, answer.headers, answer.content, code="model_not_found", param="model")
            assert len(error["message"]) < 400
    assert owner.submitted == []


async def test_a_model_without_a_chat_template_refuses_chats() -> None:
    async with serving(FakeOwner(), fake_settings(has_chat_template=False)) as server:
        answer = await post(server, CHAT, body_of(CHAT, '"n":1', stream=False))
        other = await post(server, COMPLETIONS, body_of(COMPLETIONS, '"n":1', stream=False))
    check_error(answer.status_code, answer.headers, answer.content, param="messages")
    assert answer.status_code == 400
    assert other.status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (QueueFull(3, 3), 429, True),
        (StageMissing("scheduler"), 503, True),
        (BusUnavailable("The bus is away."), 503, True),
        (BusDown("not connected"), 503, True),
        (NeverFits(70_000, 65_536), 400, False),
        (PayloadTooLarge(9_000_000, 8_388_608, "busllm.local.x"), 413, False),
        (Aborted("The request was aborted."), 499, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
@pytest.mark.parametrize("at", ["submit", "before the first text"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_text_is_a_plain_error(
    error: Any, status: int, retry_after: bool, at: str, stream: bool
) -> None:
    owner = FakeOwner(lambda request: iter([error]))
    if at == "submit":
        owner.refusal = error
    async with serving(owner) as server:
        answer = await post(server, CHAT, body_of(CHAT, '"n":1', stream=stream))
    assert answer.status_code == status
    check_error(status, answer.headers, answer.content, code=error.code)
    assert ("retry-after" in answer.headers) == retry_after


@pytest.mark.parametrize("stream", [False, True])
async def test_an_over_long_prompt_names_the_true_limit_and_count(stream: bool) -> None:
    async with serving(FakeOwner(max_context_tokens=50)) as server:
        answer = await post(server, COMPLETIONS, body_of(COMPLETIONS, f'"prompt":"{"a" * 51}"', stream=stream))
    error = check_error(answer.status_code, answer.headers, answer.content, code="context_length_exceeded")
    assert answer.status_code == 400
    assert "51" in error["message"]
    assert "50" in error["message"]


async def test_a_failure_after_the_first_text_is_one_error_event_that_openais_client_raises() -> None:
    def script(request: Any) -> Any:
        yield next(say(["Hello"])(request))
        yield StageMissing("detokenizer")

    async with serving(FakeOwner(script)) as server:
        answer = await post(server, CHAT, body_of(CHAT, '"stream":true', stream=True))
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": "x"}]
        stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        with pytest.raises(openai.APIError) as raised:
            async for _ in stream:
                pass
        await client.close()
    assert answer.status_code == 200
    events = answer.text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "stage_unavailable"
    assert "[DONE]" not in answer.text
    assert sum('"error"' in event for event in events) == 1
    assert raised.value.code == "stage_unavailable"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_the_server_shows_nothing_of_its_inside(stream: bool) -> None:
    def script(request: Any) -> Any:
        raise RuntimeError("secret /usr/lib/python3/thing.py")
        yield

    async with serving(FakeOwner(script)) as server:
        answer = await post(server, CHAT, body_of(CHAT, '"n":1', stream=stream))
        alive = await server.client.get("/health")
    assert answer.status_code == 500
    error = check_error(500, answer.headers, answer.content, code="internal_error")
    assert "secret" not in error["message"]
    assert alive.status_code == 200
