"""What a turn of the engine gives to the outside.

Owns: tokens and events in the order in which they happened, until `Engine.step` hands them out.
Does not know: who reads them.
"""

from __future__ import annotations

import time

import msgspec

from busllm.engine.live_sequence import Key, LiveSequence
from busllm.engine.sequence import FinishReason, SequenceEvent, SequenceFailure, SequenceTokens, StepOutput
from busllm.errors import BusllmError


class Outbox:
    """Collects the output of one turn."""

    def __init__(self) -> None:
        self._tokens: dict[int, SequenceTokens] = {}  # numbered: one is dropped without a look at the others
        self._numbers: dict[Key, list[int]] = {}
        self._num_tokens = 0
        self._events: list[SequenceEvent] = []
        self._failures: list[SequenceFailure] = []

    def __bool__(self) -> bool:
        return bool(self._tokens or self._events or self._failures)

    def event(self, seq: LiveSequence, name: str, *, at_s: float | None = None, **data: int | str) -> None:
        """Something happened to a sequence: now, or at `at_s` of `time.monotonic()`."""
        happened_s = time.monotonic() if at_s is None else at_s
        self._events.append(SequenceEvent(seq.key[0], seq.key[1], seq.attempt, name, data, happened_s))

    def tokens(self, seq: LiveSequence, first: int, finish_reason: FinishReason | None = None) -> None:
        """Output tokens of a sequence from index `first` on, with what was asked for beside them."""
        token_ids = seq.output_ids(first)
        with_prompt = seq.scores_prompt and first == 0 and (bool(token_ids) or finish_reason is not None)
        self._num_tokens += 1
        self._numbers.setdefault(seq.key, []).append(self._num_tokens)
        self._tokens[self._num_tokens] = SequenceTokens(
            seq.key[0],
            seq.key[1],
            seq.attempt,
            first,
            token_ids,
            tuple(seq.logprobs[first - seq.num_inherited_tokens :]) if token_ids else (),
            finish_reason,
            tuple(seq.prompt_logprobs) if with_prompt else None,
        )

    def finished(self, seq: LiveSequence, reason: FinishReason) -> None:
        """The event of a sequence that came to its own end."""
        self.event(seq, "finished", completion_tokens=seq.num_output_tokens, reason=reason.value)

    def failed(self, seq: LiveSequence, error: BusllmError) -> None:
        """A sequence is given up."""
        request = msgspec.structs.replace(seq.request, attempt=seq.attempt)
        self._failures.append(SequenceFailure(request, error))

    def take_back(self, seq: LiveSequence) -> None:
        """Drops tokens that have not been handed out: of a sequence that was aborted, or adopted once more."""
        for number in self._numbers.pop(seq.key, ()):
            del self._tokens[number]

    def take(self) -> StepOutput:
        """Hands out what there is."""
        output = StepOutput(tuple(self._tokens.values()), tuple(self._events), tuple(self._failures))
        self._tokens, self._numbers, self._events, self._failures = {}, {}, [], []
        return output
