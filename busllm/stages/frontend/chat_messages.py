"""The messages of a chat request: their shape is checked here, their meaning is the template's affair.

Owns: roles, the forms of `content`, the keys that are handed on.
Does not know: the chat template (the tokenizer stage applies it and reports what it refuses).
"""

from __future__ import annotations

from typing import Any

from busllm.errors import InvalidRequest
from busllm.messages.to_tokenizer import ChatPrompt
from busllm.stages.frontend.decoding import check_plain

ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content")
_OWN_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


def chat_prompt(
    messages: list[dict[str, Any]], add_generation_prompt: bool | None, template_options: dict[str, Any] | None
) -> ChatPrompt:
    """Checks a conversation and makes the prompt that the tokenizer stage gets.

    `developer` is the newer name of `system` and becomes it. Text parts are joined as they are. Keys that no template
    reads are left out.

    Raises:
        InvalidRequest: names the message and what is wrong with it.
    """
    if not messages:
        raise InvalidRequest("messages is empty; it must have at least one message.", param="messages")
    options = dict(template_options or {})
    for name in options:
        if name in _OWN_VARIABLES:
            raise InvalidRequest(f"chat_template_kwargs must not set {name!r}.", param="chat_template_kwargs")
    check_plain(options, "chat_template_kwargs")
    if add_generation_prompt is not None:
        options["add_generation_prompt"] = add_generation_prompt
    return ChatPrompt([_message(number, message) for number, message in enumerate(messages)], template_options=options)


def _message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{number}]"
    role = message.get("role")
    if role not in ROLES:
        shown = repr(role[:100]) if isinstance(role, str) else "missing" if role is None else "no string"
        raise InvalidRequest(f"{where}.role is {shown}; it must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    checked: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(where, message, may_be_absent=role == "assistant"),
    }
    for key in TEMPLATE_KEYS:
        if message.get(key) is not None:
            check_plain(message[key], f"{where}.{key}")
            checked[key] = message[key]
    return checked


def _content(where: str, message: dict[str, Any], *, may_be_absent: bool) -> str:
    content = message.get("content")
    match content:
        case str():
            return content
        case None if may_be_absent:
            return ""
        case list() if content:
            return "".join(_part(f"{where}.content[{number}]", part) for number, part in enumerate(content))
        case None:
            seen = "missing"
        case list():
            seen = "an empty array"
        case _:
            seen = "neither a string nor an array"
    raise InvalidRequest(
        f"{where}.content is {seen}; it must be a string or an array of text parts.", param=f"{where}.content"
    )


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} is no object.", param=where)
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        shown = kind[:100] if isinstance(kind, str) else None
        raise InvalidRequest(
            f"{where}.type {shown!r} is not supported by this server; only text parts are.", param=where
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{kind} must be a string.", param=f"{where}.{kind}")
    return text
