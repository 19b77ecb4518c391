"""What a bus can report."""

from __future__ import annotations

from busllm.errors.root import BusllmError


class BusError(BusllmError):
    """Root of what a bus can report."""

    code = "bus_error"


class BusDown(BusError):
    """Not connected: nothing was sent, nothing will be replayed."""

    code = "bus_unavailable"
    status = 503
    retryable = True


class BusCongested(BusError):
    """The outgoing buffer is full: nothing was sent."""

    code = "bus_congested"
    status = 503
    retryable = True

    def __init__(self, pending_bytes: int, max_pending_bytes: int) -> None:
        super().__init__(f"{pending_bytes} bytes wait to be sent and {max_pending_bytes} may.")
        self.pending_bytes = pending_bytes
        self.max_pending_bytes = max_pending_bytes


class PayloadTooLarge(BusError):
    """One message is larger than the bus carries; checked before publishing."""

    code = "request_too_large"
    status = 413

    def __init__(self, payload_bytes: int, max_payload_bytes: int, subject: str) -> None:
        super().__init__(
            f"A message of {payload_bytes} bytes for {subject!r} is over the bus limit of {max_payload_bytes} bytes."
        )
        self.payload_bytes = payload_bytes
        self.max_payload_bytes = max_payload_bytes
        self.subject = subject


class AnswerTooLarge(BusError):
    """The answer to a question is larger than the bus carries in one message; this error came in its place."""

    code = "answer_too_large"
    status = 413
    type = "invalid_request_error"

    def __init__(self, answer_bytes: int, max_payload_bytes: int) -> None:
        super().__init__(
            f"The answer has {answer_bytes} bytes, and the bus carries {max_payload_bytes} bytes in one message. "
            "Ask for less at once."
        )
        self.answer_bytes = answer_bytes
        self.max_payload_bytes = max_payload_bytes


class BadSubject(BusError):
    """A subject has an empty token, white space, or a wildcard where none is allowed."""

    code = "bad_subject"


class BusPermissionDenied(BusError):
    """The bus server refused a subscription, a publish or the credentials."""

    code = "bus_permission_denied"


class NoResponders(BusError):
    """A request was published to a subject that nobody listens to."""

    code = "no_responders"
    status = 503
    retryable = True


class ReplyTimeout(BusError):
    """A request on the bus had listeners, but no answer came in time."""

    code = "reply_timeout"
    status = 503
    retryable = True


class MalformedMessage(BusError):
    """A payload does not decode as what its subject carries."""

    code = "malformed_message"
    status = 400
