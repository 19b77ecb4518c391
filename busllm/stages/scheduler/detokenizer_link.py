"""The flow of batches from one scheduler to one detokenizer.

Owns: handles, batch numbers, the columns of the batch that is being filled, and back-pressure: batches are
acknowledged now and then, and with too many open ones the scheduler leaves this detokenizer's sequences out.
Next on the path: `stages/detokenizer/stage.py`.
"""

from __future__ import annotations

from busllm.engine.sequence import SequenceTokens
from busllm.messages.codec import pack_ids
from busllm.messages.to_detokenizer import MAX_UNACKNOWLEDGED, SequenceOpened, StepTokens
from busllm.plan import TokenLogprobs
from busllm.stages.scheduler.held_sequence import HeldSequence


class DetokenizerLink:
    """Batches to one detokenizer."""

    def __init__(self, scheduler: str, detokenizer: str) -> None:
        self.detokenizer = detokenizer
        self._scheduler = scheduler
        self._next_handle = 0
        self._sent = 0
        self._acknowledged = 0
        self._clear()

    def _clear(self) -> None:
        self._opened: list[SequenceOpened] = []
        self._handles: list[int] = []
        self._indexes: list[int] = []
        self._offsets: list[int] = [0]
        self._token_ids: list[int] = []
        self._finished: list[tuple[int, str]] = []
        self._logprobs: list[tuple[int, tuple[TokenLogprobs, ...]]] = []
        self._prompt_logprobs: list[tuple[int, bytes, tuple[TokenLogprobs | None, ...]]] = []

    @property
    def is_congested(self) -> bool:
        """Whether too many batches are open."""
        return self._sent - self._acknowledged > MAX_UNACKNOWLEDGED

    def acknowledge(self, number: int) -> None:
        """The detokenizer has taken every batch up to this number."""
        self._acknowledged = max(self._acknowledged, min(number, self._sent))

    def open(self, held: HeldSequence) -> None:
        """Gives a sequence a handle here."""
        held.handle = self._next_handle
        self._next_handle += 1
        self._opened.append(held.opened())

    def add(self, held: HeldSequence, tokens: SequenceTokens) -> None:
        """Adds a row to the batch."""
        row = len(self._handles)
        self._handles.append(held.handle)
        self._indexes.append(tokens.index)
        self._token_ids.extend(tokens.token_ids)
        self._offsets.append(len(self._token_ids))
        if tokens.finish_reason is not None:
            self._finished.append((row, tokens.finish_reason.value))
        if tokens.logprobs:
            self._logprobs.append((row, tokens.logprobs))
        if tokens.prompt_logprobs is not None:
            self._prompt_logprobs.append((row, held.generate.prompt_ids, tokens.prompt_logprobs))

    def take_batch(self, *, nudge: bool = False) -> StepTokens | None:
        """The filled batch under its number; None when nothing was added.

        Args:
            nudge: make one without rows too. While nothing else is sent it brings the acknowledgement that was lost.
        """
        if not self._handles and not self._opened and not nudge:
            return None
        self._sent += 1
        batch = StepTokens(
            self._scheduler,
            self._sent,
            tuple(self._opened),
            pack_ids(self._handles),
            pack_ids(self._indexes),
            pack_ids(self._offsets),
            pack_ids(self._token_ids),
            tuple(self._finished),
            tuple(self._logprobs),
            tuple(self._prompt_logprobs),
        )
        self._clear()
        return batch
