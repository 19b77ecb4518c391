"""The bodies that clients get, as Structs: what is encoded and what the OpenAPI document shows.

Owns: the shapes of whole answers. Chunks of streams have the same fields and are written by `chunks.py`, faster.
Does not know: how an answer comes about.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How the prompt's tokens came about: `cached_tokens` were found in the prefix cache."""

    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """Token counts of a request, each prompt counted once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Alternative(msgspec.Struct, frozen=True):
    """A token that was likely. `bytes` are its UTF-8 bytes; a token may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct, frozen=True):
    """A token of a chat answer with its log probability."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a chat answer."""

    content: list[ChatToken]
    refusal: None = None


class ChatAnswer(msgspec.Struct, frozen=True):
    """The message of a choice."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer of a chat request."""

    index: int
    message: ChatAnswer
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    """Answer of `POST /v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: Literal["chat.completion"] = "chat.completion"


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a completion: four lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer of a completions request."""

    index: int
    text: str
    finish_reason: str
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct, frozen=True):
    """Answer of `POST /v1/completions`."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody
    object: Literal["text_completion"] = "text_completion"


class Model(msgspec.Struct, frozen=True):
    """A served model. `max_model_len` counts prompt and answer together."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "busllm"


class ModelList(msgspec.Struct, frozen=True):
    """Answer of `GET /v1/models`."""

    data: list[Model]
    object: Literal["list"] = "list"


class Tokens(msgspec.Struct, frozen=True):
    """Answer of `POST /tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizedText(msgspec.Struct, frozen=True):
    """Answer of `POST /detokenize`."""

    prompt: str


class Status(msgspec.Struct, frozen=True):
    """Answer of `GET /health` and `GET /ready`."""

    status: str
