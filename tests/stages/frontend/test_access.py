"""API keys and browsers from other origins."""

from __future__ import annotations

from pathlib import Path

import pytest

from busllm.errors import ConfigError
from busllm.stages.frontend.auth import read_api_keys
from busllm.testing.fake_owner import FakeOwner
from busllm.testing.frontend_server import fake_settings, serving
from busllm.testing.http_oracles import check_error

pytestmark = pytest.mark.anyio

KEYS = frozenset({"sk-first", "sk-second"})
CHAT = "/v1/chat/completions"


async def test_without_keys_everything_is_open() -> None:
    async with serving(FakeOwner()) as server:
        assert (await server.client.get("/v1/models")).status_code == 200
        assert (await server.client.get("/v1/models", headers={"authorization": "Bearer x"})).status_code == 200


async def test_with_keys_only_health_and_readiness_are_open() -> None:
    async with serving(FakeOwner(), fake_settings(api_keys=KEYS)) as server:
        for path in ("/health", "/ready"):
            assert (await server.client.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nope"):
            answer = await server.client.get(path)
            assert answer.status_code == 401, path
            check_error(401, answer.headers, answer.content, code="invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await server.client.post(CHAT, content=b"{}")).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("authorization", "Bearer sk-first")], 200),
        ([("authorization", "bearer sk-second")], 200),
        ([("authorization", "BEARER sk-first")], 200),
        ([("authorization", "Bearer sk-firs")], 401),
        ([("authorization", "Bearer sk-first1")], 401),
        ([("authorization", "Bearer")], 401),
        ([("authorization", "")], 401),
        ([("authorization", "Basic sk-first")], 401),
        ([("authorization", "sk-first")], 401),
        ([("authorization", "Bearer sk-first"), ("authorization", "Bearer wrong")], 401),
        ([("x-api-key", "sk-first")], 401),
    ],
)
async def test_the_whole_key_must_be_right(headers: list[tuple[str, str]], status: int) -> None:
    async with serving(FakeOwner(), fake_settings(api_keys=KEYS)) as server:
        answer = await server.client.get("/v1/models", headers=headers)
    assert answer.status_code == status
    assert "sk-" not in answer.text


def test_a_file_of_keys_has_one_per_line_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nsk-first\n\n  sk-second  \n")
    assert read_api_keys(file) == KEYS


@pytest.mark.parametrize("content", [b"", b"# nothing\n\n", b"\xff\xfe"])
def test_a_file_without_a_key_does_not_open_the_server(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_api_keys(file)
    assert raised.value.key == "frontend.api_keys_file"


def test_a_missing_file_of_keys_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_api_keys(tmp_path / "none")


PREFLIGHT = {
    "origin": "https://chat.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize("origins", [("https://chat.example",), ("*",)])
async def test_a_preflight_is_allowed_without_a_key(origins: tuple[str, ...]) -> None:
    async with serving(FakeOwner(), fake_settings(api_keys=KEYS, cors_origins=origins)) as server:
        answer = await server.client.options(CHAT, headers=PREFLIGHT)
        real = await server.client.post(CHAT, headers={"origin": "https://chat.example"}, content=b"{}")
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert real.status_code == 401
    assert real.headers["access-control-allow-origin"] == "https://chat.example"
    assert "x-request-id" in real.headers["access-control-expose-headers"]


async def test_another_origin_gets_no_permission() -> None:
    async with serving(FakeOwner(), fake_settings(cors_origins=("https://chat.example",))) as server:
        preflight = await server.client.options(CHAT, headers={**PREFLIGHT, "origin": "https://evil.example"})
        answer = await server.client.get("/v1/models", headers={"origin": "https://evil.example"})
    for seen in (preflight, answer):
        assert "access-control-allow-origin" not in seen.headers
        assert seen.headers["vary"] == "origin"


async def test_without_cors_a_preflight_is_405() -> None:
    async with serving(FakeOwner(), fake_settings(api_keys=KEYS)) as server:
        answer = await server.client.options(CHAT, headers=PREFLIGHT)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
