"""What people, stock tools and stages ask each other in JSON: announcements, probes, control verbs.

Owns: `Announcement` on `stage.<kind>.<instance>` and the questions and answers of `control.<instance>.<verb>`.
Does not know: who decides what follows from an announcement (`actors/directory.py`).
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from busllm.errors import BusllmError, RemoteError
from busllm.messages.codec import Decoder, encode_json

PROTOCOL_VERSION = 1
ERROR_PREFIX = b'{"error":'  # how an answer begins that is an error


class StageState(enum.Enum):
    """State that an instance announces. `gone` is said by the process that started it, after its exit."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


class Versions(msgspec.Struct, frozen=True):
    """What must agree before two stages work together.

    Attributes:
        protocol: version of the messages.
        package: version of busllm.
        topology: hash of what all hosts must have in common.
        model: fingerprint of the model's files; empty where the stage has none or has not loaded it.
    """

    protocol: int = PROTOCOL_VERSION
    package: str = ""
    topology: str = ""
    model: str = ""


class Announcement(msgspec.Struct, frozen=True):
    """Announcement and heartbeat of one instance, every half second.

    Attributes:
        kind, index, instance: who.
        host, pid: where its process is.
        state: see `StageState`.
        progress: what it is doing while it starts, for people.
        started_at: seconds since the epoch at which it started, to tell the older of two apart.
        versions: see `Versions`.
        load: small numbers that routing uses.
        statistics: counts for people, metrics and tests.
    """

    kind: str
    index: int
    instance: str
    host: str
    pid: int
    state: StageState
    progress: str = ""
    started_at: float = 0.0
    versions: Versions = Versions()
    load: dict[str, float] = {}
    statistics: dict[str, Any] = {}


class Probe(msgspec.Struct, frozen=True):
    """ "What became of these?": asked of a stage about requests that were silent."""

    uids: tuple[str, ...]


class ProbedSequence(msgspec.Struct, frozen=True, array_like=True):
    """One sequence at the probed stage.

    Attributes:
        state: waiting, running, finished, or lost (at a scheduler: its detokenizer is).
        next_index: index of the next token that it would send.
    """

    choice: int
    attempt: int
    state: str
    next_index: int


class ProbeAnswer(msgspec.Struct, frozen=True):
    """What the stage knows; a uid that is not there is unknown to it."""

    instance: str
    sequences: dict[str, tuple[ProbedSequence, ...]]


class LiveAnswer(msgspec.Struct, frozen=True):
    """Requests (uid, attempt) that an owner is still waiting for."""

    instance: str
    live: tuple[tuple[str, int], ...]


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Answer of a control verb that failed: `{"error": {…}}`, the same words as `Failed`."""

    error: ErrorBody


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong; see `errors.BusllmError`."""

    code: str
    message: str
    type: str = "server_error"
    status: int = 500
    param: str | None = None
    retryable: bool = False


def error_answer(error: BusllmError) -> bytes:
    """Encodes the answer that carries an error."""
    body = ErrorBody(error.code, error.message, error.type, error.status, error.param, error.retryable)
    return encode_json(ErrorAnswer(body))


def raise_if_error(answer: bytes) -> None:
    """Raises the `RemoteError` that an answer carries, if it carries one."""
    if not answer.startswith(ERROR_PREFIX):
        return
    body = _error_decoder.decode(answer).error
    raise RemoteError(
        body.message,
        code=body.code,
        status=body.status,
        type=body.type,
        param=body.param,
        retryable=body.retryable,
    )


_error_decoder: Decoder[ErrorAnswer] = Decoder(ErrorAnswer, json=True)
announcement_decoder: Decoder[Announcement] = Decoder(Announcement, json=True)
probe_decoder: Decoder[Probe] = Decoder(Probe, json=True)
probe_answer_decoder: Decoder[ProbeAnswer] = Decoder(ProbeAnswer, json=True)
live_answer_decoder: Decoder[LiveAnswer] = Decoder(LiveAnswer, json=True)
