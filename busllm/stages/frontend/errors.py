"""Errors as HTTP answers and as events: one envelope everywhere, the shape that OpenAI's clients read.

Owns: `{"error": {"message", "type", "param", "code"}}` and the headers that belong to a status.
Does not know: which errors there are (`busllm/errors/`).
"""

from __future__ import annotations

import msgspec

from busllm.errors import BusllmError, MethodNotAllowed, PayloadTooLarge, RequestError, Unauthorized, Unavailable
from busllm.stages.frontend.http import Header, Response


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong.

    Attributes:
        message: for people.
        type: OpenAI's class of error.
        param: the field that is to blame, or null.
        code: stable word for programs.
    """

    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The body of every answer that is an error, and the data of an error event."""

    error: ErrorDetail


def envelope(error: BusllmError) -> ErrorEnvelope:
    """The error as clients see it: the same finding, without names of the bus."""
    message, type_ = error.message, error.type
    if isinstance(error, PayloadTooLarge):
        seen, limit = error.payload_bytes, error.max_payload_bytes
        message = f"The request makes a message of {seen} bytes, and the bus carries {limit} bytes in one. Send less."
        type_ = RequestError.type
    return ErrorEnvelope(ErrorDetail(_encodable(message), type_, error.param, error.code))


def error_response(error: BusllmError) -> Response:
    """The error as a plain HTTP answer."""
    headers: list[Header] = []
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, Unavailable):
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    elif error.status in (429, 503):
        headers.append((b"retry-after", str(Unavailable.retry_after_s).encode()))
    return Response(msgspec.json.encode(envelope(error)), error.status, headers=tuple(headers))


def error_event(error: BusllmError) -> bytes:
    """The error as the last event of a stream; openai-python raises `APIError` on it. No `[DONE]` follows."""
    return b"data: " + msgspec.json.encode(envelope(error)) + b"\n\n"


def internal_error() -> BusllmError:
    """What a client is told about a fault of the server: nothing of its inside."""
    return BusllmError("The server failed to handle this request; its log says why.")


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
