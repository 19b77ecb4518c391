"""Where one answer is in its grammar.

Owns: the state of one sequence, and the rule which of the tokens that the grammar knows may come next.
Does not know: logits, slots. It depends on the answer's tokens alone, so it is made anew after a retraction or on
another host by taking the same tokens again.
Next on the path: `busllm/engine/slot_grammars.py`.

The rule. A token may come when the grammar allows its bytes. End-of-turn and stop tokens may come, too, where the
answer may end. With `ignore_eos` the end of turn comes only when nothing else can: the answer is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from busllm.errors import InvalidRequest

if TYPE_CHECKING:
    import llguidance

_SHOWN_CHARACTERS = 500


class GrammarMatcher:
    """One sequence under a grammar.

    Args:
        matcher: of the library, at the beginning; used by this object alone.
        num_logits: of the model.
        eos_token_ids: tokens that end a turn.
        param: the request's field that the grammar came in.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, num_logits: int, eos_token_ids: tuple[int, ...], param: str
    ) -> None:
        self._matcher = matcher
        self._num_logits = num_logits
        self._eos_token_ids = list(eos_token_ids)
        self._param = param
        self._words = np.zeros(-(-num_logits // 32), dtype=np.uint32)
        self.num_taken = 0

    def take(self, token_ids: Sequence[int]) -> None:
        """Goes on by tokens of the answer. What follows the answer's end is ignored.

        Raises:
            InvalidRequest: the grammar does not allow one of them, or became too complex to follow.
        """
        self.num_taken += len(token_ids)
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(token_ids))
        self._check()

    def allowed(self, *, stop_token_ids: Sequence[int] = (), ignore_eos: bool = False) -> npt.NDArray[np.bool_]:
        """Which tokens may come next; at least one.

        Args:
            stop_token_ids: tokens that end the sequence beside the end of turn.
            ignore_eos: the end of turn is wanted only when nothing else can come.

        Returns:
            bool (num_logits,).

        Raises:
            InvalidRequest: the grammar became too complex to follow, or has come to a place that no token leads out of.
        """
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        allowed = np.unpackbits(self._words.view(np.uint8), count=self._num_logits, bitorder="little").view(np.bool_)
        if ignore_eos and allowed[self._eos_token_ids].any():
            allowed[self._eos_token_ids] = False
            if not allowed.any():
                allowed[self._eos_token_ids] = True
        if stop_token_ids and self.may_end:
            allowed[list(stop_token_ids)] = True
        if not allowed.any():
            raise InvalidRequest(
                "No token of this model can go on with the answer under its grammar.", param=self._param
            )
        return allowed

    @property
    def may_end(self) -> bool:
        """Whether the answer so far is a whole one."""
        return self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end can follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(
                f"The grammar cannot be followed: {reason(self._matcher.get_error())}", param=self._param
            )


def reason(error: str) -> str:
    """The library's finding, fit for a client: its first part, not too long."""
    text = error.partition("\n<")[0].strip()
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
