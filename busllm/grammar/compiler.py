"""From a `Grammar` to a matcher.

Owns: what exists once the first grammar has come, and which compiled ones there are. May be used from several threads.
Does not know: tokenizers, requests, the notation of the library (`notation.py`, imported with the first grammar).
Next on the path: `matcher.py`.

A compiled grammar is found as long as somebody holds it, and the last few of them beyond that. So who needs one later
holds it, and whoever asks for the same grammar meanwhile compiles nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

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


class CompiledGrammar:
    """Makes matchers of one grammar, in any thread.

    Args:
        prototype: of the library, at the beginning; used by this object alone.
        vocabulary: of the model.
    """

    def __init__(self, prototype: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self._prototype = prototype
        self._vocabulary = vocabulary
        self._copying = threading.Lock()

    def matcher(self, param: str) -> GrammarMatcher:
        """A matcher at the beginning of an answer.

        Args:
            param: the request's field that the grammar came in.
        """
        with self._copying:
            copy = self._prototype.deep_copy()
        return self._matcher_on(copy, param)

    def try_out(self, param: str) -> None:
        """Makes the first mask, and takes a token: some limits of the library are met only there.

        So a grammar beyond them is refused where that costs nobody a step. Later copies begin with what is found out.

        Args:
            param: the request's field that the grammar came in.

        Raises:
            InvalidRequest: no token can begin an answer, or the grammar is too complex to be followed.
        """
        first = np.flatnonzero(self._matcher_on(self._prototype, param).allowed())
        self.matcher(param).take([int(first[0])])

    def _matcher_on(self, prototype: llguidance.LLMatcher, param: str) -> GrammarMatcher:
        return GrammarMatcher(prototype, len(self._vocabulary.token_bytes), self._vocabulary.eos_token_ids, param)


class GrammarCompiler:
    """Compiles for one model.

    Args:
        load: called once, when the first grammar comes: most servers never see one.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._loaded: _Loaded | None = None
        self._looking = threading.Lock()
        self._held: WeakValueDictionary[tuple[GrammarKind, str], CompiledGrammar] = WeakValueDictionary()
        self._latest: OrderedDict[tuple[GrammarKind, str], CompiledGrammar] = OrderedDict()

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles a grammar, unless it is there; whoever finds one waits for nobody who compiles another.

        Raises:
            InvalidRequest: the grammar does not compile, is too complex, no token can begin an answer under it, or the
                model has no token that could end one.
        """
        key = (grammar.kind, grammar.text)
        compiled = self.found(grammar) or self._compile(grammar)
        with self._looking:
            compiled = self._held.setdefault(key, compiled)  # another thread may have been faster
            self._latest[key] = compiled
            self._latest.move_to_end(key)
            if len(self._latest) > MAX_CACHED:
                self._latest.popitem(last=False)
        return compiled

    def found(self, grammar: Grammar) -> CompiledGrammar | None:
        """What was compiled before, if it is still there; takes no time."""
        with self._looking:
            return self._held.get((grammar.kind, grammar.text))

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of an answer.

        Raises:
            InvalidRequest: as `compiled`.
        """
        return self.compiled(grammar).matcher(grammar.param)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        """What `compiled` does when there is nothing to be found."""
        from busllm.grammar.notation import compile_grammar

        loaded = self._vocabulary()
        if loaded.tokenizer is None:
            raise InvalidRequest(
                "This model has no token that ends a turn, so no grammar can end its answer.", param=grammar.param
            )
        compiled = CompiledGrammar(compile_grammar(grammar, loaded.tokenizer), loaded.vocabulary)
        compiled.try_out(grammar.param)
        return compiled

    def _vocabulary(self) -> _Loaded:
        with self._loading:
            if self._loaded is None:
                from busllm.grammar.notation import make_tokenizer

                vocabulary = self._load()
                self._loaded = _Loaded(vocabulary, make_tokenizer(vocabulary) if vocabulary.eos_token_ids else None)
            return self._loaded
