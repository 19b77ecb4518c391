"""What an owner is asked for and what it gives back, free of HTTP and of the bus.

Owns: `GenerationRequest` (in) and `ChoiceDelta` (out).
Does not know: attempts and stages (`live.py`), the OpenAI surface (`stages/frontend/`).
"""

from __future__ import annotations

import msgspec

from busllm.messages.to_frontend import TokenText, Usage
from busllm.messages.to_tokenizer import Prompt
from busllm.sampling import SamplingParams


class GenerationRequest(msgspec.Struct, frozen=True):
    """A checked request.

    Attributes:
        prompts: one or more.
        params: sampling settings; `seed` None = one is drawn.
        n: choices per prompt; choice number = prompt number * n + choice of that prompt.
        priority: larger goes first.
        cache_namespace: root of the prefix cache.
    """

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    n: int = 1
    priority: int = 0
    cache_namespace: bytes = b""


class ChoiceDelta(msgspec.Struct, frozen=True):
    """New output of one choice: of one step of the engine, or of several when it was left unread for long.

    Attributes:
        choice: its number.
        text: may be empty.
        token_ids: the tokens that made the text.
        logprobs: one per token, when asked for.
        prompt_logprobs: one per prompt token, once, when asked for.
        finish_reason: stop | length, in the last delta of the choice.
        usage: in the last delta of the choice.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenText, ...] = ()
    prompt_logprobs: tuple[TokenText, ...] | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
