"""The masks of a step, made beside its forward pass.

Owns: when a mask is made, by which thread, and the way of chosen tokens to the grammars.
Does not know: which tokens a grammar allows (`slot_grammars.py`), logits.
Next on the path: `grammar_mask.py`.

The mask of a row depends on its newest token. On a CPU that is known before the forward pass begins. The forward pass
is one call, or many, that hold no GIL for most of their time, so a thread makes the masks meanwhile. On a device the
newest token may still be on its way: the forward pass of this step is launched first, then the host waits for the mark
of the step that chose the token, and makes the masks while the device computes. Without any grammar in the step nobody
waits, and there is no thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch

from busllm.engine.cores import unbind_thread
from busllm.engine.slot_grammars import GrammarState, Mask
from busllm.engine.slot_states import SlotStates
from busllm.errors import EngineError

Masks = Mapping[int, Mask]
"""By row; rows without a grammar have none."""


class Mark(Protocol):
    """A point in the device's queue."""

    def wait(self) -> None:
        """Waits until the device has passed it."""
        ...


class _Chosen(NamedTuple):
    """Tokens of a launched step, on the host once its mark is passed, and the grammars that have not heard of them."""

    mark: Mark
    token_ids: torch.Tensor
    states: Mapping[int, GrammarState]


class StepMasks:
    """Masks of the steps of a runner that chooses tokens; the steps are launched one after the other.

    Args:
        slots: of the runner.
        in_thread: the host computes the forward pass, so that masks are made beside it by a thread; else a device does.
    """

    def __init__(self, slots: SlotStates, *, in_thread: bool) -> None:
        self._slots = slots
        self._in_thread = in_thread
        self._thread: ThreadPoolExecutor | None = None
        self._chosen: deque[_Chosen] = deque()

    def begin(self, rows: Sequence[tuple[int, int]]) -> Callable[[], Masks]:
        """Before the forward pass of a step.

        Args:
            rows: slot and position of each token to be chosen.

        Returns:
            Gives the masks; to be called once, when the forward pass is done or launched.

        Raises:
            EngineError: a grammar has heard of more or fewer tokens than there are.
        """
        states = self._states([slot for slot, _ in rows])
        if not states:
            return dict
        num_prompt_tokens = self._slots.num_prompt_tokens
        expected = {row: rows[row][1] - int(num_prompt_tokens[rows[row][0]]) for row in states}
        if not self._in_thread:
            return lambda: self._make(states, expected)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "masks", initializer=unbind_thread)
        return self._thread.submit(self._make, states, expected).result

    def chose(self, slots: Sequence[int], token_ids: torch.Tensor, mark: Mark) -> None:
        """A step that chooses tokens is launched.

        Args:
            slots: of the rows that sample.
            token_ids: int64 (num_rows,), on the host once `mark` is passed.
            mark: end of the step.
        """
        states = self._states(slots)
        if states:
            self._chosen.append(_Chosen(mark, token_ids, states))

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _states(self, slots: Sequence[int]) -> dict[int, GrammarState]:
        states = ((row, self._slots.grammars.of(slot)) for row, slot in enumerate(slots))
        return {row: state for row, state in states if state is not None}

    def _make(self, states: Mapping[int, GrammarState], expected: Mapping[int, int]) -> Masks:
        while self._chosen:
            chosen = self._chosen.popleft()
            chosen.mark.wait()
            token_ids = chosen.token_ids.tolist()
            for row, state in chosen.states.items():
                state.add(token_ids[row])
        for row, state in states.items():
            if state.num_tokens != expected[row]:
                raise EngineError(f"row {row}: its grammar knows {state.num_tokens} tokens, there are {expected[row]}")
        return {row: state.mask() for row, state in states.items()}
