"""Where the sequences in the slots are in their grammars.

Owns: one matcher per slot whose request has a grammar, brought up to date with the slot's tokens. It is made when the
slot's first token is chosen, so only who samples has any; a sequence that comes back, or was sent on, takes its tokens
again.
Does not know: logits (`engine/grammar_mask.py`), how a grammar is compiled.
Next on the path: `busllm/grammar/matcher.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from busllm.errors import EngineError
from busllm.grammar.compiler import GrammarCompiler
from busllm.grammar.matcher import GrammarMatcher
from busllm.sampling import Grammar, SamplingParams


class SlotGrammars:
    """Matchers by slot.

    Args:
        compiler: of the model; None = this runner cannot keep to a grammar, and gets none.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._matchers: dict[int, GrammarMatcher] = {}

    def close(self, slot: int) -> None:
        """The sequence leaves its slot."""
        self._matchers.pop(slot, None)

    def num_taken(self, slot: int, grammar: Grammar) -> int:
        """How many tokens of the answer its matcher has taken.

        Raises:
            EngineError: there is no compiler.
            InvalidRequest: the grammar does not compile.
        """
        return self._matcher(slot, grammar).num_taken

    def allowed(
        self, slot: int, grammar: Grammar, params: SamplingParams, token_ids: Sequence[int]
    ) -> npt.NDArray[np.bool_]:
        """Which tokens may come next in a slot.

        Args:
            token_ids: of the answer, from `num_taken` on.

        Returns:
            bool (num_logits,).

        Raises:
            InvalidRequest: the answer cannot go on under its grammar.
        """
        matcher = self._matcher(slot, grammar)
        if token_ids:
            matcher.take(token_ids)
        return matcher.allowed(stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos)

    def _matcher(self, slot: int, grammar: Grammar) -> GrammarMatcher:
        matcher = self._matchers.get(slot)
        if matcher is None:
            if self._compiler is None:
                raise EngineError(f"slot {slot} has a grammar, but its runner was made without a compiler")
            matcher = self._matchers[slot] = self._compiler.matcher(grammar)
        return matcher
