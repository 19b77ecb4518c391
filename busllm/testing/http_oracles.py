"""What every HTTP answer must fulfil, whoever made it.

Owns: the checks of an error, of a stream, and of a stream against the whole answer.
Does not know: the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_INSIDE = re.compile(r"Traceback|Error\(|busllm\.|site-packages|\.py\b|/usr/|/home/|msgspec")
FINISH_REASONS = frozenset({"stop", "length"})


def check_error(
    status: int, headers: Mapping[str, str], raw: bytes, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Checks that an answer is an error in OpenAI's envelope that shows nothing of the server's inside.

    Args:
        code, param: what the error must have, where given.

    Returns:
        The error.
    """
    assert 400 <= status < 600, status
    assert headers["content-type"].partition(";")[0] == "application/json", headers
    body = json.loads(raw)
    assert set(body) == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str), error
    assert error["message"], error
    assert isinstance(error["type"], str), error
    assert error["param"] is None or isinstance(error["param"], str), error
    assert not _INSIDE.search(error["message"]), error["message"]
    if code is not None:
        assert error["code"] == code, error
    if param is not None:
        assert error["param"] == param, error
    return error


def parse_events(raw: bytes) -> list[Any]:
    """The data of each event: decoded JSON, or the text `[DONE]`. Comments are left out."""
    assert raw == b"" or raw.endswith(b"\n\n"), raw[-200:]
    events: list[Any] = []
    for block in raw.split(b"\n\n")[:-1]:
        if block.startswith(b":"):
            continue
        assert block.startswith(b"data: "), block
        assert b"\n" not in block, block
        data = block.removeprefix(b"data: ")
        events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return events


class StreamedChoice:
    """What a stream said about one choice."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.logprobs: list[Any] = []


def check_stream(raw: bytes, num_choices: int, *, chat: bool, with_usage: bool = False) -> dict[int, StreamedChoice]:
    """Checks every rule of a stream that ends well and puts its choices together.

    Returns:
        The choices by index, all of them finished.
    """
    events = parse_events(raw)
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    chunks = events[:-1]
    assert {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}.__len__() == 1
    _check_usage(chunks, with_usage)
    choices: dict[int, StreamedChoice] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            _add_choice(choices, choice, chat=chat)
    assert sorted(choices) == list(range(num_choices))
    assert all(choice.finish_reason in FINISH_REASONS for choice in choices.values())
    return choices


def _check_usage(chunks: list[Any], with_usage: bool) -> None:
    if not with_usage:
        assert all("usage" not in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)
        return
    *others, last = chunks
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


def _add_choice(choices: dict[int, StreamedChoice], chunk: dict[str, Any], *, chat: bool) -> None:
    index = chunk["index"]
    is_first = index not in choices
    choice = choices.setdefault(index, StreamedChoice())
    assert choice.finish_reason is None, "a finished choice goes on"
    assert "finish_reason" in chunk
    assert chunk["finish_reason"] != ""
    choice.finish_reason = chunk["finish_reason"]
    if chat:
        assert ("role" in chunk["delta"]) == is_first, chunk
        choice.text += chunk["delta"].get("content", "")
        choice.logprobs += (chunk["logprobs"] or {}).get("content", [])
    else:
        choice.text += chunk["text"]
        if chunk["logprobs"]:
            choice.logprobs.append(chunk["logprobs"])
