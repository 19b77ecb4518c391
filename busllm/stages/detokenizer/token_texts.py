"""Tokens with their log probabilities, as text for the client.

Owns: the step from token ids to bytes; a token may be a part of a character.
Next on the path: `text_rows.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from busllm.messages.to_frontend import TokenText
from busllm.plan import TokenLogprobs
from busllm.text.tokenizer import Tokenizer


def token_texts(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> tuple[TokenText, ...]:
    """One entry per token that has log probabilities; the first token of a prompt has none."""
    return tuple(_token_text(tokenizer, token_id, one) for token_id, one in zip(token_ids, logprobs, strict=False))


def _token_text(tokenizer: Tokenizer, token_id: int, logprobs: TokenLogprobs | None) -> TokenText:
    if logprobs is None:
        return TokenText(tokenizer.token_bytes(token_id), None)
    top = tuple((other, tokenizer.token_bytes(other), value) for other, value in logprobs.top)
    return TokenText(tokenizer.token_bytes(token_id), logprobs.chosen, top)
