"""The text of one sequence, as its tokens come.

Owns: `Decoder`: what may be delivered after each token, and at which token a stop string ended the sequence.
The text *is* the join of the deltas: streamed and unstreamed answers, and usage, are made of the same deltas.
Does not know: requests, the bus; how ids become text (`tokenizer.py`) and stop strings are found (`stop_strings.py`).
Next on the path: the detokenizer stage sends the deltas to the frontend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from busllm.text.stop_strings import StopMatcher
from busllm.text.tokenizer import Tokenizer

# Enough to have text before the answer, and the beginning of a character that the prompt left incomplete.
NUM_PROMPT_TAIL_IDS = 16


class Delta(NamedTuple):
    """What one push gave.

    Attributes:
        text: new text that may be delivered.
        stopped: a stop string was found; the text ends before it and nothing more comes.
        num_tokens_kept: how many of the pushed tokens count: all, or up to the one that completed the stop string.
    """

    text: str
    stopped: bool
    num_tokens_kept: int


class Step(NamedTuple):
    """What the tokens of one step gave.

    Attributes:
        text: new text that may be delivered; with the last step, what was held back too.
        num_tokens_kept: how many of the tokens count.
        finish_reason: "stop" when a stop string was found, else what the engine said; None = it goes on.
    """

    text: str
    num_tokens_kept: int
    finish_reason: str | None


class Decoder:
    """Decodes one sequence incrementally.

    Args:
        tokenizer: the model's.
        prompt_tail_ids: the prompt, or its end; the last `NUM_PROMPT_TAIL_IDS` are used. They give no text.
        stop: strings that end the text and are not part of it.
        skip_special_tokens: special tokens give no text.
        min_tokens: a stop string may not end before that many tokens; text up to there is never held back.
        stop_token_ids: tokens that may end the sequence; the one that does counts but gives no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_tail_ids: Sequence[int] = (),
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._stream = tokenizer.stream(prompt_tail_ids[-NUM_PROMPT_TAIL_IDS:], skip_special_tokens)
        self._matcher = StopMatcher(stop) if stop else None
        self._min_tokens = min_tokens
        self._stop_token_ids = stop_token_ids
        self._num_tokens = 0
        self._stopped = False

    @property
    def num_tokens(self) -> int:
        """Tokens pushed so far that count."""
        return self._num_tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stopped

    def take(self, ids: Sequence[int], finish_reason: str | None) -> Step:
        """Takes the tokens of one step of an engine.

        Args:
            ids: 0 … k new tokens.
            finish_reason: why the engine ended the sequence with them ("stop": by its last token); None = it goes on.
        """
        is_unseen = finish_reason == "stop" and bool(ids) and ids[-1] in self._stop_token_ids
        delta = self.push(ids[:-1] if is_unseen else ids)
        if delta.stopped:
            return Step(delta.text, delta.num_tokens_kept, "stop")
        if finish_reason is None:
            return Step(delta.text, len(ids), None)
        text = delta.text + self.flush()
        return Step(text, len(ids), "stop" if self._stopped else finish_reason)

    def push(self, ids: Sequence[int]) -> Delta:
        """Takes the next tokens. The text does not depend on how the tokens are spread over calls.

        After a stop string nothing counts any more: the delta is empty.
        """
        if self._stopped:
            return Delta("", True, 0)
        pieces: list[str] = []
        for index, token_id in enumerate(ids):
            self._num_tokens += 1
            pieces.append(self._deliverable(self._stream.step(token_id)))
            if self._stopped:
                return Delta("".join(pieces), True, index + 1)
        return Delta("".join(pieces), False, len(ids))

    def replay(self, ids: Sequence[int], num_delivered_chars: int = 0) -> Delta:
        """Takes the tokens that another decoder of the same sequence had, when the sequence goes on here.

        Args:
            ids: all tokens of the answer so far.
            num_delivered_chars: how much of the text the client has already.

        Returns:
            As `push`, with only the text behind what was delivered.
        """
        delta = self.push(ids)
        return delta._replace(text=delta.text[num_delivered_chars:])

    def flush(self) -> str:
        """Ends the sequence; returns the text that was held back.

        An incomplete character becomes U+FFFD, as the whole decode gives it. Empty after a stop string.
        """
        if self._stopped:
            return ""
        text = self._deliverable(self._stream.flush())
        if self._stopped or self._matcher is None:
            return text
        return text + self._matcher.flush()

    def _deliverable(self, text: str) -> str:
        if self._matcher is None or self._num_tokens < self._min_tokens:
            return text
        found = self._matcher.push(text)
        self._stopped = found.stopped
        return found.text
