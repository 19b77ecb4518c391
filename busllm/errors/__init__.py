"""The one error tree of busllm.

Owns: every exception that busllm raises on purpose, its stable `code`, and the HTTP status it becomes. Numbers are
attributes, so that nobody parses a message. A message says what was seen, what is allowed and what to do.
Does not know: who raises or catches. Errors are caught in three places only: the seam (translates a library's error),
the stage boundary (answers the client), the supervisor.
Next on the path: `messages/to_frontend.py`, whose `Failed` carries code, message, param and status over the bus.
"""

from __future__ import annotations

from busllm.errors.availability import (
    Aborted,
    BusUnavailable,
    Draining,
    Lost,
    QueueFull,
    RemoteError,
    ResumeDeadlineExceeded,
    StageMissing,
    Unavailable,
)
from busllm.errors.bus import (
    AnswerTooLarge,
    BadSubject,
    BusCongested,
    BusDown,
    BusError,
    BusPermissionDenied,
    MalformedMessage,
    NoResponders,
    PayloadTooLarge,
    ReplyTimeout,
)
from busllm.errors.request import (
    BodyTooLarge,
    ContextLengthExceeded,
    HeadTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NeverFits,
    NotFound,
    RequestError,
    RequestTimeout,
    Unauthorized,
    UnsupportedMediaType,
)
from busllm.errors.root import BusllmError
from busllm.errors.server import (
    AddressUnavailable,
    AlreadyRunning,
    ChecksumMismatch,
    ConfigError,
    EngineError,
    FetchFailed,
    IntegrityError,
    MissingPackage,
    ModelError,
    Superseded,
)

__all__ = [
    "Aborted",
    "AddressUnavailable",
    "AlreadyRunning",
    "AnswerTooLarge",
    "BadSubject",
    "BodyTooLarge",
    "BusCongested",
    "BusDown",
    "BusError",
    "BusPermissionDenied",
    "BusUnavailable",
    "BusllmError",
    "ChecksumMismatch",
    "ConfigError",
    "ContextLengthExceeded",
    "Draining",
    "EngineError",
    "FetchFailed",
    "HeadTooLarge",
    "IntegrityError",
    "InvalidRequest",
    "Lost",
    "MalformedMessage",
    "MethodNotAllowed",
    "MissingPackage",
    "ModelError",
    "ModelNotFound",
    "NeverFits",
    "NoResponders",
    "NotFound",
    "PayloadTooLarge",
    "QueueFull",
    "RemoteError",
    "ReplyTimeout",
    "RequestError",
    "RequestTimeout",
    "ResumeDeadlineExceeded",
    "StageMissing",
    "Superseded",
    "Unauthorized",
    "Unavailable",
    "UnsupportedMediaType",
]
