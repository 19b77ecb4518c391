"""What a tokenizer receives: `tokenize.<tokenizer>.<uid>`.

Owns: `Tokenize` and the forms of a prompt.
Next on the path: `stages/tokenizer.py`, then `messages/to_scheduler.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from busllm.ids import check_tokens
from busllm.messages.codec import Decoder, check_numbers
from busllm.messages.parts import Part
from busllm.sampling import SamplingParams


class ChatPrompt(msgspec.Struct, frozen=True, array_like=True, tag="chat", gc=False):
    """A conversation, to be put through the model's chat template.

    Attributes:
        messages: as the client sent them, checked for shape (`role`, `content`, …).
        tools: tool descriptions for the template, or None.
        template_options: further variables for the template.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}


class TextPrompt(msgspec.Struct, frozen=True, array_like=True, tag="text", gc=False):
    """A text as it is."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, array_like=True, tag="ids", gc=False):
    """Token ids as they are, packed int32 little-endian."""

    token_ids: bytes


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag="tokenize", gc=False):
    """A request on its way to be tokenized and handed to a scheduler.

    Attributes:
        uid, attempt: which request, which try.
        frontend: instance that owns it and gets every reply.
        prompts: one per prompt of the request; choice = prompt number * n + choice of that prompt.
        params: sampling settings, the same for all choices.
        seed: signed 64-bit; each choice derives its own.
        n: choices per prompt.
        priority: larger goes first.
        cache_namespace: root of the prefix cache.
        avoid: instances that must not be chosen (suspect or just lost to the frontend).
    """

    uid: str
    attempt: int
    frontend: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    seed: int
    n: int = 1
    priority: int = 0
    cache_namespace: bytes = b""
    avoid: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_tokens(self.uid, self.frontend)
        check_numbers(self.attempt, self.n)


ToTokenizer = Tokenize | Part
decoder: Decoder[ToTokenizer] = Decoder(ToTokenizer)
