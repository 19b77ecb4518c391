"""From a `Grammar` to a matcher.

Owns: what exists once the first grammar has come, and a cache of compiled ones. May be used from several threads.
Does not know: tokenizers, requests, the notation of the library (`notation.py`, imported with the first grammar).
Next on the path: `matcher.py`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from busllm.errors import InvalidRequest
from busllm.grammar.matcher import GrammarMatcher
from busllm.grammar.vocabulary import Vocabulary
from busllm.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    import llguidance

MAX_CACHED = 32


@dataclass(frozen=True)
class _Loaded:
    """What the first grammar loads; without a token that ends a turn there is no tokenizer."""

    vocabulary: Vocabulary
    tokenizer: llguidance.LLTokenizer | None


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
            from busllm.grammar.notation import compile_grammar

            # It may take long, so nobody who finds a compiled one waits for it.
            compiled = compile_grammar(grammar, loaded.tokenizer)
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
                from busllm.grammar.notation import make_tokenizer

                vocabulary = self._load()
                self._loaded = _Loaded(vocabulary, make_tokenizer(vocabulary) if vocabulary.eos_token_ids else None)
            return self._loaded
