"""What a detokenizer receives: `detokenize.<detokenizer>`, one batch per step and scheduler.

Owns: the columnar `StepTokens` and `SequenceOpened`, which gives a sequence a small number (handle) for its rows.
Next on the path: `stages/detokenizer/stage.py`, then `messages/to_frontend.py`.
"""

from __future__ import annotations

import msgspec

from busllm.ids import check_tokens
from busllm.messages.codec import Decoder, check_numbers
from busllm.messages.parts import Part
from busllm.plan import TokenLogprobs

ACKNOWLEDGED_EVERY = 16  # a detokenizer acknowledges when so many batches have come since it last did
MAX_UNACKNOWLEDGED = 64  # with more batches open rank 0 leaves the detokenizer's sequences out of its steps


class SequenceOpened(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence begins (or goes on) at this detokenizer.

    Attributes:
        handle: number of the sequence in the rows of this scheduler's batches.
        uid, choice, attempt, frontend: whose it is.
        prompt_tail: packed int32: the last few prompt ids, enough to prime a decoder.
        output_ids: packed int32: tokens before this attempt, to be replayed.
        delivered_chars: how much of the replayed text the client has.
        stop: strings that end the text.
        skip_special_tokens: special tokens do not appear in the text.
        prompt_tokens, cached_tokens: for the usage.
        min_tokens: a stop string may not end before that many tokens.
        stop_token_ids: tokens that may end the sequence; the one that does gives no text.
    """

    handle: int
    uid: str
    choice: int
    attempt: int
    frontend: str
    prompt_tail: bytes
    output_ids: bytes
    delivered_chars: int
    stop: tuple[str, ...]
    skip_special_tokens: bool
    prompt_tokens: int
    cached_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_tokens(self.uid, self.frontend)
        check_numbers(self.handle, self.choice, self.attempt, self.delivered_chars)


class StepTokens(msgspec.Struct, frozen=True, array_like=True, tag="step", gc=False):
    """All new tokens of one step for one detokenizer; row i is tokens[offsets[i] : offsets[i + 1]].

    Attributes:
        scheduler: instance that computed them.
        number: counts up by one per batch of this scheduler to this detokenizer.
        opened: sequences that begin with this batch.
        handles: packed int32, one per row.
        indexes: packed int32, position of each row's first token in the output.
        offsets: packed int32, rows + 1 entries.
        token_ids: packed int32, all rows.
        finished: (row, finish reason) of sequences that the engine ended.
        logprobs: (row, one per token) where asked for.
        prompt_logprobs: (row, packed int32 prompt ids, one per prompt token, None for the first) where asked for.
    """

    scheduler: str
    number: int
    opened: tuple[SequenceOpened, ...]
    handles: bytes
    indexes: bytes
    offsets: bytes
    token_ids: bytes
    finished: tuple[tuple[int, str], ...] = ()
    logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()
    prompt_logprobs: tuple[tuple[int, bytes, tuple[TokenLogprobs | None, ...]], ...] = ()

    def __post_init__(self) -> None:
        check_tokens(self.scheduler)


ToDetokenizer = StepTokens | Part
decoder: Decoder[ToDetokenizer] = Decoder(ToDetokenizer)
