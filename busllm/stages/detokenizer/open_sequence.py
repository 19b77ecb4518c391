"""One sequence at a detokenizer: its decode state and how far it is.

Owns: the incremental decoder with the stop strings of one sequence.
Does not know: batches (`stage.py`, `text_rows.py`).
"""

from __future__ import annotations

from busllm.messages.codec import unpack_ids
from busllm.messages.to_detokenizer import SequenceOpened
from busllm.messages.to_frontend import Usage
from busllm.text.decoder import Decoder
from busllm.text.tokenizer import Tokenizer


class OpenSequence:
    """One open sequence: its decoder and how far it is."""

    __slots__ = ("decoder", "next_index", "opened", "scheduler")

    def __init__(self, scheduler: str, opened: SequenceOpened, tokenizer: Tokenizer) -> None:
        self.scheduler = scheduler
        self.opened = opened
        self.decoder = Decoder(
            tokenizer,
            prompt_tail_ids=unpack_ids(opened.prompt_tail).tolist(),
            stop=opened.stop,
            skip_special_tokens=opened.skip_special_tokens,
            min_tokens=opened.min_tokens,
            stop_token_ids=opened.stop_token_ids,
        )
        self.next_index = 0

    def usage(self, completion_tokens: int) -> Usage:
        """Token counts for the client."""
        return Usage(self.opened.prompt_tokens, self.opened.cached_tokens, completion_tokens)
