"""Log probabilities in the two forms that OpenAI's API has.

Owns: tokens as text. A token that is a part of a character shows U+FFFD there, and its bytes beside it (chat).
Does not know: whether they were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

from busllm.messages.to_frontend import TokenText
from busllm.stages.frontend.answers import Alternative, ChatToken, CompletionLogprobs

LEAST_LOGPROB = -9999.0
"""Stands for a probability of zero, because JSON has no infinity."""


def chat_tokens(tokens: Iterable[TokenText]) -> list[ChatToken]:
    """Tokens as chat answers show them."""
    return [
        ChatToken(
            _text(token.token),
            _finite(token.logprob),
            list(token.token),
            [Alternative(_text(raw), _finite(logprob), list(raw)) for _, raw, logprob in token.top],
        )
        for token in tokens
    ]


def completion_logprobs(tokens: Iterable[TokenText], num_top: int, offset: int) -> tuple[CompletionLogprobs, int]:
    """Tokens as completions show them, and the offset that the next one has.

    `top_logprobs` has the `num_top` most likely tokens and the chosen one, as in OpenAI's API. Tokens with the same
    text (parts of characters) share an entry, the likeliest one's.

    Args:
        offset: position in characters of the first token in the choice's text.
    """
    shown = CompletionLogprobs([], [], [], [])
    for token in tokens:
        text = _text(token.token)
        shown.tokens.append(text)
        shown.text_offset.append(offset)
        offset += len(text)
        if token.logprob is None:
            shown.token_logprobs.append(None)
            shown.top_logprobs.append(None)
            continue
        logprob = _finite(token.logprob)
        top: dict[str, float] = {}
        for _, raw, value in token.top:
            top.setdefault(_text(raw), _finite(value))
        if num_top:
            top.setdefault(text, logprob)
        shown.token_logprobs.append(logprob)
        shown.top_logprobs.append(top)
    return shown, offset


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _finite(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None or not logprob > LEAST_LOGPROB else logprob
