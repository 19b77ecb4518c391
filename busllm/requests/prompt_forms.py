"""Prompts as a Python program has them.

Owns: telling a text, token ids and a conversation apart, and the form in which each travels.
Does not know: HTTP bodies (`stages/frontend/`), chat templates (`text/`).
Next on the path: `messages/to_tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from busllm.errors import InvalidRequest
from busllm.messages.codec import encode, pack_ids
from busllm.messages.to_tokenizer import ChatPrompt, Prompt, TextPrompt, TokenPrompt

LARGEST_TOKEN_ID = 2**31 - 1  # what an int32 holds; the model's own vocabulary is checked where the model is

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]]


def as_prompt(prompt: PromptLike) -> Prompt:
    """The form in which a prompt travels.

    Raises:
        InvalidRequest: it is empty, mixed, or holds what no message can carry.
    """
    form = _form_of(prompt)
    try:
        encode(form)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # lone surrogates are a ValueError
        raise InvalidRequest(f"The prompt cannot be sent: {error}.", param="prompt") from error
    return form


def _form_of(prompt: PromptLike) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return ChatPrompt([dict(item) for item in items if isinstance(item, Mapping)])
    ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
    if not items or len(ids) < len(items) or not all(0 <= token_id <= LARGEST_TOKEN_ID for token_id in ids):
        raise InvalidRequest(
            "A prompt is a text, a list of token ids or a list of messages, not empty.", param="prompt"
        )
    return TokenPrompt(pack_ids(ids))
