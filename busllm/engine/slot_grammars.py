"""Where the sequences in the slots are in their grammars.

Owns: one record per slot whose request has a grammar: its matcher, and the tokens that the matcher has not taken yet.
The matcher is made when the slot's first token is chosen, so only who samples has any; a sequence that comes back, or
was sent on, takes its tokens again.
Does not know: logits (`engine/grammar_mask.py`), how a grammar is compiled, who keeps it compiled.
Next on the path: `busllm/grammar/matcher.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from busllm.errors import EngineError, InvalidRequest
from busllm.grammar.compiler import GrammarCompiler
from busllm.grammar.matcher import GrammarMatcher
from busllm.sampling import Grammar, SamplingParams

Mask = npt.NDArray[np.bool_] | str
"""Which tokens may come next, bool (num_logits,); or why none can, in words for the client."""


class GrammarState:
    """One sequence that has a slot, under its grammar. It outlives the slot while a launched step knows it.

    Args:
        compiler: of the model; None = of a runner that does not choose tokens.
        grammar, params: of the request.
        output_ids: what the answer has already.
    """

    def __init__(
        self, compiler: GrammarCompiler | None, grammar: Grammar, params: SamplingParams, output_ids: Sequence[int]
    ) -> None:
        self._compiler = compiler
        self._grammar = grammar
        self._params = params
        self._untaken = list(output_ids)
        self._matcher: GrammarMatcher | None = None
        self.num_tokens = len(self._untaken)

    def add(self, token_id: int) -> None:
        """The answer has one more token."""
        self._untaken.append(token_id)
        self.num_tokens += 1

    def mask(self) -> Mask:
        """Which tokens may come next.

        Raises:
            EngineError: there is no compiler.
        """
        try:
            matcher = self._matcher = self._matcher or self._make_matcher()
            if self._untaken:
                untaken, self._untaken = self._untaken, []
                matcher.take(untaken)
            return matcher.allowed(stop_token_ids=self._params.stop_token_ids, ignore_eos=self._params.ignore_eos)
        except InvalidRequest as error:
            return error.message

    def _make_matcher(self) -> GrammarMatcher:
        if self._compiler is None:
            raise EngineError("a sequence has a grammar, but its runner was made without a compiler")
        # The engine has had it compiled and holds it: nothing is compiled here.
        return self._compiler.matcher(self._grammar)


class SlotGrammars:
    """States by slot.

    Args:
        compiler: of the model; None = this runner chooses no token under a grammar.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._states: dict[int, GrammarState] = {}

    def open(self, slot: int, params: SamplingParams, output_ids: Sequence[int]) -> None:
        """A sequence takes a slot, with the tokens that its answer has already."""
        if params.grammar is not None:
            self._states[slot] = GrammarState(self._compiler, params.grammar, params, output_ids)

    def close(self, slot: int) -> None:
        """The sequence leaves its slot."""
        self._states.pop(slot, None)

    def masks(self, slots: Sequence[int]) -> dict[int, Mask]:
        """The masks of rows, by row; rows whose slots have no grammar have none.

        Args:
            slots: whose row it is.
        """
        states = ((row, self.of(slot)) for row, slot in enumerate(slots))
        return {row: state.mask() for row, state in states if state is not None}

    def of(self, slot: int) -> GrammarState | None:
        """The state of the sequence in a slot; None = it has no grammar."""
        return self._states.get(slot)
