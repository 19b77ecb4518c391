"""What every stage receives: `abort.<uid>`.

Owns: the payload of an abort: empty ends the uid (all choices, all attempts); an attempt, written as decimal digits,
ends that one and earlier ones. So `nats pub busllm.<cluster>.abort.<uid> ''` works as it is.
"""

from __future__ import annotations

from busllm.errors import MalformedMessage

MAX_DIGITS = 10


def encode_abort(attempt: int | None = None) -> bytes:
    """Payload of an abort of attempts up to `attempt`; None = the whole request."""
    return b"" if attempt is None else str(attempt).encode()


def decode_abort(payload: bytes) -> int | None:
    """The attempt that an abort names; None = the whole request.

    Raises:
        MalformedMessage: neither empty nor a decimal number.
    """
    text = payload.strip()
    if not text:
        return None
    if not text.isdigit() or len(text) > MAX_DIGITS:
        raise MalformedMessage("An abort's payload is empty or an attempt in decimal digits.")
    return int(text)
