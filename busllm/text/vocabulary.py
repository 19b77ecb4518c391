"""A model's tokens as grammars see them.

Owns: the way from a tokenizer to `Vocabulary`: the bytes are those that the stream decoders write, so that an answer is
as its grammar wants it.
Does not know: grammars, how a tokenizer finds the bytes of a token.
Next on the path: `busllm/grammar/compiler.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from busllm.grammar.vocabulary import Vocabulary
from busllm.model_store.description import describe
from busllm.model_store.files import ModelFiles
from busllm.text.tokenizer import Tokenizer, load_tokenizer


def load_vocabulary(files: ModelFiles) -> Vocabulary:
    """Reads a model's tokens from its files.

    Raises:
        ModelError: it has no tokenizer, or files are damaged.
    """
    description = describe(files)
    return vocabulary_of(load_tokenizer(files), description.vocab_size, description.eos_token_ids)


def vocabulary_of(tokenizer: Tokenizer, num_logits: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """Reads the bytes of every token.

    Args:
        num_logits: of the model; more than the tokenizer has tokens = the rest have no text, fewer = the rest are
            impossible.
        eos_token_ids: tokens that end a turn.
    """

    def encode(text: str) -> Sequence[int]:
        return tokenizer.encode_batch([text], add_special_tokens=False)[0]

    num_tokens = min(num_logits, tokenizer.vocab_size)
    token_bytes = tuple(map(tokenizer.token_bytes, range(num_tokens))) + (b"",) * (num_logits - num_tokens)
    return Vocabulary(
        token_bytes=token_bytes,
        special_ids=frozenset(token_id for token_id in tokenizer.special_ids if token_id < num_logits),
        eos_token_ids=tuple(token_id for token_id in eos_token_ids if token_id < num_logits),
        encode=encode,
    )
