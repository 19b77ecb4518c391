"""Grammars in the library's notation.

Owns: the translation of each kind of grammar, the limits of what one may cost, and the vocabulary as llguidance wants
to see it.
Does not know: what is compiled when (`compiler.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import assert_never

import llguidance
import msgspec

from busllm.errors import InvalidRequest
from busllm.grammar.matcher import reason
from busllm.grammar.vocabulary import Vocabulary
from busllm.sampling import Grammar, GrammarKind

MAX_LEXER_STATES = 50_000  # 1 to 2 kB each
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the words of JSON; bounded, because a small model may never come to an end of its blanks."""


def make_tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """The vocabulary of a model that has a token which ends a turn."""
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Tokens(vocabulary)), eos_token=list(vocabulary.eos_token_ids)
    )


def compile_grammar(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """A matcher of the library at the beginning of an answer.

    Raises:
        InvalidRequest: the grammar does not compile.
    """
    limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, _translated(grammar), log_level=0, limits=limits)
    if matcher.is_error():
        raise InvalidRequest(f"{grammar.param} does not compile: {reason(matcher.get_error())}", param=grammar.param)
    return matcher


def _translated(grammar: Grammar) -> str:
    """The grammar in the library's notation."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json_schema(grammar)
        case GrammarKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            return llguidance.LLMatcher.grammar_from_lark(_choice(grammar))
        case GrammarKind.LARK:
            return llguidance.LLMatcher.grammar_from_lark(grammar.text)
        case _:
            assert_never(grammar.kind)


def _json_schema(grammar: Grammar) -> str:
    text = grammar.text.strip()
    if text == "false":
        raise InvalidRequest(f"{grammar.param} is the schema `false`, which no answer fits.", param=grammar.param)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            "{}" if text == "true" else text,  # the same to JSON Schema; the library wants an object
            defaults={"whitespace_pattern": WHITESPACE},
        )
    except ValueError as error:
        raise InvalidRequest(f"{grammar.param} is no JSON schema: {error}", param=grammar.param) from error


def _choice(grammar: Grammar) -> str:
    try:
        texts = msgspec.json.decode(grammar.text, type=list[str])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{grammar.param} is no JSON list of texts: {error}", param=grammar.param) from error
    if not any(texts):
        raise InvalidRequest(f"{grammar.param} has no text to choose.", param=grammar.param)
    # One terminal of all texts: as items of a rule their number would be limited, and each would cost at every step.
    return "start: TEXT\nTEXT: " + " | ".join(json.dumps(text) for text in texts)


class _Tokens:
    """A vocabulary as the library wants to see it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens: Sequence[bytes] = vocabulary.token_bytes
        self.special_token_ids = sorted(vocabulary.special_ids)
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return list(self._encode(text if isinstance(text, str) else text.decode(errors="replace")))
