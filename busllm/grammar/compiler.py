"""From a `Grammar` to a matcher.

Owns: the translation of the kinds of grammars to the library's notation, the limits of what a grammar may cost, and a
cache of compiled ones. May be used from several threads.
Does not know: tokenizers, requests.
Next on the path: `matcher.py`.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import llguidance
import msgspec

from busllm.errors import InvalidRequest
from busllm.grammar.matcher import GrammarMatcher, reason
from busllm.grammar.vocabulary import Vocabulary
from busllm.sampling import Grammar, GrammarKind

MAX_CACHED = 32
MAX_LEXER_STATES = 50_000  # 1 to 2 kB each
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the words of JSON; bounded, because a small model may never come to an end of its blanks."""


class GrammarCompiler:
    """Makes matchers for one model.

    Args:
        load: called once, when the first grammar comes: most servers never see one.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._loaded: _Loaded | None = None
        self._looking = threading.Lock()
        self._compiled: OrderedDict[tuple[GrammarKind, str], llguidance.LLMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of an answer.

        Raises:
            InvalidRequest: the grammar does not compile, or the model has no token that could end an answer.
        """
        key = (grammar.kind, grammar.text)
        loaded = self._vocabulary()
        eos_token_ids = loaded.vocabulary.eos_token_ids
        if loaded.tokenizer is None:
            raise InvalidRequest(
                "This model has no token that ends a turn, so no grammar can end its answer.", param=grammar.param
            )
        with self._looking:
            compiled = self._compiled.get(key)
        if compiled is None:
            compiled = _compile(grammar, loaded.tokenizer)  # may take long; who has a compiled one does not wait
        with self._looking:
            self._compiled[key] = compiled
            self._compiled.move_to_end(key)
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            copy = compiled.deep_copy()
        return GrammarMatcher(copy, len(loaded.vocabulary.token_bytes), eos_token_ids, grammar.param)

    def _vocabulary(self) -> _Loaded:
        with self._loading:
            if self._loaded is None:
                vocabulary = self._load()
                self._loaded = _Loaded(vocabulary, _tokenizer(vocabulary) if vocabulary.eos_token_ids else None)
            return self._loaded


@dataclass(frozen=True)
class _Loaded:
    """What the first grammar loads; without a token that ends a turn there is no tokenizer."""

    vocabulary: Vocabulary
    tokenizer: llguidance.LLTokenizer | None


def _compile(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, _translated(grammar), log_level=0, limits=limits)
    if matcher.is_error():
        raise InvalidRequest(f"{grammar.param} does not compile: {reason(matcher.get_error())}", param=grammar.param)
    return matcher


def _translated(grammar: Grammar) -> str:
    """The grammar in the library's notation."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return llguidance.LLMatcher.grammar_from_json_schema(
                    grammar.text, defaults={"whitespace_pattern": WHITESPACE}
                )
            except ValueError as error:
                raise InvalidRequest(f"{grammar.param} is no JSON schema: {error}", param=grammar.param) from error
        case GrammarKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            return llguidance.LLMatcher.grammar_from_lark(_choice(grammar))
        case GrammarKind.LARK:
            return llguidance.LLMatcher.grammar_from_lark(grammar.text)
        case _:
            assert_never(grammar.kind)


def _choice(grammar: Grammar) -> str:
    try:
        texts = msgspec.json.decode(grammar.text, type=list[str])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{grammar.param} is no JSON list of texts: {error}", param=grammar.param) from error
    if not any(texts):
        raise InvalidRequest(f"{grammar.param} has no text to choose.", param=grammar.param)
    return "start: " + " | ".join(json.dumps(text) for text in texts)


def _tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Tokens(vocabulary)), eos_token=list(vocabulary.eos_token_ids)
    )


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
