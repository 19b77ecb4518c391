"""Rows of new text gathered for one frontend in one wake-up.

Owns: the columns of a `StepText` while they grow.
Next on the path: `requests/owner.py` in the frontend.
"""

from __future__ import annotations

from collections.abc import Sequence

from busllm.messages.codec import pack_ids
from busllm.messages.to_frontend import StepText, TokenText, Usage
from busllm.stages.detokenizer.open_sequence import OpenSequence


class TextRows:
    """Rows gathered for one frontend."""

    def __init__(self) -> None:
        self.uids: list[str] = []
        self.choices: list[int] = []
        self.attempts: list[int] = []
        self.indexes: list[int] = []
        self.texts: list[str] = []
        self.offsets: list[int] = [0]
        self.token_ids: list[int] = []
        self.finished: list[tuple[int, str, Usage]] = []
        self.logprobs: list[tuple[int, tuple[TokenText, ...]]] = []
        self.prompt_logprobs: list[tuple[int, tuple[TokenText, ...]]] = []

    def add(self, sequence: OpenSequence, index: int, text: str, token_ids: Sequence[int]) -> int:
        """Adds a row; returns its number."""
        opened = sequence.opened
        self.uids.append(opened.uid)
        self.choices.append(opened.choice)
        self.attempts.append(opened.attempt)
        self.indexes.append(index)
        self.texts.append(text)
        self.token_ids.extend(token_ids)
        self.offsets.append(len(self.token_ids))
        return len(self.uids) - 1

    def message(self, detokenizer: str) -> StepText:
        """The batch."""
        return StepText(
            detokenizer,
            tuple(self.uids),
            pack_ids(self.choices),
            pack_ids(self.attempts),
            pack_ids(self.indexes),
            tuple(self.texts),
            pack_ids(self.offsets),
            pack_ids(self.token_ids),
            tuple(self.finished),
            tuple(self.logprobs),
            tuple(self.prompt_logprobs),
        )
