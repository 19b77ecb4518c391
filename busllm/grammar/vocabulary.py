"""What grammars know of a model's tokens.

Owns: `Vocabulary`.
Does not know: tokenizers (`busllm/text/vocabulary.py` makes one from a tokenizer), grammars.
Next on the path: `compiler.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """One entry per logit of the model.

    Attributes:
        token_bytes: what each token adds to the text; empty for a logit that has no token.
        special_ids: tokens that are no text, so that no grammar meets their letters.
        eos_token_ids: tokens that end a turn: they may come where an answer may end.
        encode: a text as the model's tokenizer would write it.
    """

    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]
