"""The four forms of `prompt` of a completions request.

Owns: telling a text, a list of texts, a list of token ids and a list of such lists apart.
Does not know: tokenizing; whether an empty text has a token to begin with is for the tokenizer stage to say.
"""

from __future__ import annotations

from typing import Any

from busllm.errors import InvalidRequest
from busllm.messages.codec import pack_ids
from busllm.messages.to_tokenizer import TextPrompt, TokenPrompt

MAX_PROMPTS = 1024


def completion_prompts(prompt: Any, vocab_size: int) -> tuple[TextPrompt | TokenPrompt, ...]:
    """Makes the prompts of a request, in their order.

    Raises:
        InvalidRequest: the value is none of the four forms, mixes them, is empty, has too many prompts, or an id that
            the model does not have.
    """
    if isinstance(prompt, str):
        return (TextPrompt(prompt),)
    if not isinstance(prompt, list) or not prompt:
        seen = "an empty array" if prompt == [] else "of the wrong type"
        raise _wrong(f"prompt is {seen}")
    if all(isinstance(item, str) for item in prompt):
        prompts: tuple[TextPrompt | TokenPrompt, ...] = tuple(TextPrompt(item) for item in prompt)
    elif all(type(item) is int for item in prompt):
        prompts = (_tokens(prompt, vocab_size),)
    elif all(isinstance(item, list) for item in prompt):
        prompts = tuple(_tokens(item, vocab_size) for item in prompt)
    else:
        raise _wrong("prompt mixes forms")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed.", param="prompt")
    return prompts


def check_token_ids(name: str, token_ids: list[int], vocab_size: int) -> None:
    """Checks that every id exists.

    Raises:
        InvalidRequest: one does not.
    """
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(f"{name} has the token id {bad}; this model has 0 to {vocab_size - 1}.", param=name)


def _tokens(token_ids: list[Any], vocab_size: int) -> TokenPrompt:
    if not token_ids:
        raise _wrong("prompt has an empty array")
    if not all(type(token_id) is int for token_id in token_ids):
        raise _wrong("prompt mixes forms")
    check_token_ids("prompt", token_ids, vocab_size)
    return TokenPrompt(pack_ids(token_ids))


def _wrong(seen: str) -> InvalidRequest:
    return InvalidRequest(
        f"{seen}; it must be a string, an array of strings, an array of token ids, or an array of such arrays.",
        param="prompt",
    )
