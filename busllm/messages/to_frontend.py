"""What a frontend (or any owner of requests) receives: `reply.<frontend>.step` and `reply.<frontend>.<uid>`.

Owns: `StepText`, one batch of text per step, and the single replies `Taken`, `Tokenized`, `Failed`.
Next on the path: `requests/owner.py`.
"""

from __future__ import annotations

import msgspec

from busllm.errors import BusllmError, RemoteError
from busllm.messages.codec import Decoder
from busllm.messages.parts import Part


class Usage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Token counts of one sequence, the output counted up to the cut of a stop string."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class TokenText(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token as text, with its log probability.

    Attributes:
        token: its bytes; a token may be a part of a character.
        logprob: of the unfiltered distribution at temperature 1; None for the first token of a prompt.
        top: the most likely (token id, bytes, log probability), best first.
    """

    token: bytes
    logprob: float | None
    top: tuple[tuple[int, bytes, float], ...] = ()


class StepText(msgspec.Struct, frozen=True, array_like=True, tag="text", gc=False):
    """All new text of one step for one frontend; row i made of tokens[offsets[i] : offsets[i + 1]].

    Attributes:
        detokenizer: instance that made the text.
        uids, choices, attempts: whose row it is.
        indexes: packed int32, position of the row's first token in the output.
        texts: new text per row (may be empty while a character or a stop string is open).
        offsets, token_ids: packed int32.
        finished: (row, finish reason, usage).
        logprobs, prompt_logprobs: (row, one per token).
    """

    detokenizer: str
    uids: tuple[str, ...]
    choices: bytes
    attempts: bytes
    indexes: bytes
    texts: tuple[str, ...]
    offsets: bytes
    token_ids: bytes
    finished: tuple[tuple[int, str, Usage], ...] = ()
    logprobs: tuple[tuple[int, tuple[TokenText, ...]], ...] = ()
    prompt_logprobs: tuple[tuple[int, tuple[TokenText, ...]], ...] = ()


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken", gc=False):
    """A stage took the request over; sent on receipt, so that its absence may be waited for.

    Attributes:
        choices: which of its choices; empty = all.
    """

    uid: str
    attempt: int
    stage: str
    instance: str
    choices: tuple[int, ...] = ()


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag="tokenized", gc=False):
    """The tokenizer is done: what a frontend needs to send the request on without it.

    Attributes:
        prompt_ids: packed int32, one per prompt.
        scheduler: instance that it was sent to; None = there was none.
    """

    uid: str
    attempt: int
    prompt_ids: tuple[bytes, ...]
    scheduler: str | None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed", gc=False):
    """A stage cannot go on with the request. With `retryable` the frontend sends it on; else the client gets it."""

    uid: str
    attempt: int
    stage: str
    code: str
    message: str
    error_type: str
    status: int
    param: str | None = None
    retryable: bool = False


ToFrontend = StepText | Taken | Tokenized | Failed | Part
decoder: Decoder[ToFrontend] = Decoder(ToFrontend)


def failed(uid: str, attempt: int, stage: str, error: BusllmError) -> Failed:
    """Makes the message that carries an error to the owner of the request."""
    return Failed(
        uid, attempt, stage, error.code, error.message, error.type, error.status, error.param, error.retryable
    )


def remote_error(message: Failed) -> RemoteError:
    """The error that a `Failed` carries."""
    return RemoteError(
        message.message,
        code=message.code,
        status=message.status,
        type=message.error_type,
        param=message.param,
        retryable=message.retryable,
    )
