"""The one error tree of busllm.

Owns: every exception that busllm raises on purpose, its stable `code`, and the HTTP status it becomes. Numbers are
attributes, so that nobody parses a message. A message says what was seen, what is allowed and what to do.
Does not know: who raises or catches. Errors are caught in three places only: the seam (translates a library's error),
the stage boundary (answers the client), the supervisor.
Next on the path: `messages/to_frontend.py`, whose `Failed` carries `code`, `message`, `param` and `status` across the bus.
"""

from __future__ import annotations


class BusllmError(Exception):
    """Root of the tree.

    Attributes:
        code: stable word for programs; travels in `Failed` and in the HTTP error body.
        status: HTTP status that a frontend answers with.
        type: OpenAI's error type.
        retryable: whether another instance (or a later moment) may succeed with the unchanged request.
    """

    code: str = "internal_error"
    status: int = 500
    type: str = "server_error"
    retryable: bool = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


# ---------------------------------------------------------------- what a client did


class RequestError(BusllmError):
    """The request cannot be served as it is; sending it again unchanged will not help."""

    code = "invalid_value"
    status = 400
    type = "invalid_request_error"


class InvalidRequest(RequestError):
    """A field is missing, unknown, of the wrong type or out of range; `param` names it."""


class ContextLengthExceeded(RequestError):
    """The prompt leaves no room for a token in the model's context."""

    code = "context_length_exceeded"

    def __init__(self, num_prompt_tokens: int, max_context_tokens: int, param: str = "messages") -> None:
        super().__init__(
            f"The prompt has {num_prompt_tokens} tokens, but this model's context is {max_context_tokens} tokens, "
            "prompt and answer together. Shorten the prompt.",
            param=param,
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_context_tokens = max_context_tokens


class NeverFits(RequestError):
    """The sequence needs more KV cache than this server has, even when it runs alone."""

    code = "exceeds_kv_capacity"

    def __init__(self, num_tokens: int, capacity_tokens: int) -> None:
        super().__init__(
            f"The prompt has {num_tokens} tokens, but the KV cache of this server holds {capacity_tokens} tokens. "
            "Shorten the prompt or start the server with a larger scheduler.kv_tokens.",
            param="messages",
        )
        self.num_tokens = num_tokens
        self.capacity_tokens = capacity_tokens


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve."""

    code = "model_not_found"
    status = 404


class NotFound(RequestError):
    """No such path."""

    code = "not_found"
    status = 404


class MethodNotAllowed(RequestError):
    """The path exists, the method does not; `allowed` goes into the `Allow` header."""

    code = "method_not_allowed"
    status = 405

    def __init__(self, method: str, path: str, allowed: tuple[str, ...]) -> None:
        super().__init__(f"{method} is not allowed for {path}. Allowed: {', '.join(allowed)}.")
        self.allowed = allowed


class Unauthorized(RequestError):
    """No API key, or a wrong one."""

    code = "invalid_api_key"
    status = 401
    type = "authentication_error"


class BodyTooLarge(RequestError):
    """The HTTP body is larger than `frontend.max_body_bytes`, or the request than the bus can carry."""

    code = "request_too_large"
    status = 413

    def __init__(self, num_bytes: int | None, max_bytes: int) -> None:
        seen = "The body" if num_bytes is None else f"The body has {num_bytes} bytes and"
        super().__init__(f"{seen} is over the limit of {max_bytes} bytes.")
        self.num_bytes = num_bytes
        self.max_bytes = max_bytes


class HeadTooLarge(RequestError):
    """The request line and headers are larger than a request may have."""

    code = "head_too_large"
    status = 431

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"The request line and headers have {num_bytes} bytes and are over the limit of {max_bytes} bytes."
        )
        self.num_bytes = num_bytes
        self.max_bytes = max_bytes


class RequestTimeout(RequestError):
    """The HTTP body did not arrive in time."""

    code = "request_timeout"
    status = 408

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"The body was not complete after {wait_s:g} s.")
        self.wait_s = wait_s


class UnsupportedMediaType(RequestError):
    """The body is declared as something other than JSON."""

    code = "unsupported_media_type"
    status = 415


# ---------------------------------------------------------------- what the server cannot do now


class Unavailable(BusllmError):
    """Nothing is wrong with the request; the server cannot take it now. Answered with `Retry-After`."""

    code = "unavailable"
    status = 503
    retryable = True

    retry_after_s = 1


class QueueFull(Unavailable):
    """The waiting queue of a scheduler, or the frontend's own, is full."""

    code = "queue_full"
    status = 429
    type = "rate_limit_error"

    def __init__(self, num_waiting: int, max_waiting: int) -> None:
        super().__init__(
            f"{num_waiting} requests are waiting and {max_waiting} may. Send the request again in a moment."
        )
        self.num_waiting = num_waiting
        self.max_waiting = max_waiting


class StageMissing(Unavailable):
    """No live instance of a stage that the request needs."""

    code = "stage_unavailable"

    def __init__(self, kind: str, reason: str = "no instance is ready") -> None:
        super().__init__(f"The {kind} stage is not available: {reason}.")
        self.kind = kind


class BusUnavailable(Unavailable):
    """The bus is away and did not come back within the request's deadline."""

    code = "bus_unavailable"


class Draining(Unavailable):
    """This instance is shutting down and takes nothing new."""

    code = "draining"


class Lost(Unavailable):
    """A stage lost a part of a sequence (a hole in the stream, a restart): the next attempt repairs it."""

    code = "lost"


class ResumeDeadlineExceeded(Unavailable):
    """A request in flight lost its stage and nobody could take it over within `frontend.resume_deadline_s`."""

    code = "resume_deadline_exceeded"


class RemoteError(BusllmError):
    """What another stage reported: the same code, status and type as the error that it raised there."""

    def __init__(self, message: str, *, code: str, status: int, type: str, param: str | None, retryable: bool) -> None:
        super().__init__(message, param=param)
        self.code = code
        self.status = status
        self.type = type
        self.retryable = retryable


class Aborted(BusllmError):
    """The request was ended by an abort on the bus (an operator, or the owner)."""

    code = "aborted"
    status = 499
    type = "aborted"


# ---------------------------------------------------------------- the bus


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


# ---------------------------------------------------------------- configuration, models, engine


class ConfigError(BusllmError):
    """A topology file or flag is wrong.

    Attributes:
        file: the file, or None for the built-in topology.
        key: full dotted key.
        line: 1-based line where it can be found.
        suggestion: the nearest right key or value.
    """

    code = "bad_config"

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        key: str | None = None,
        line: int | None = None,
        suggestion: str | None = None,
    ) -> None:
        super().__init__(message, param=key)
        self.file = file
        self.key = key
        self.line = line
        self.suggestion = suggestion

    def __str__(self) -> str:
        line = "" if self.line is None else f":{self.line}"
        places = [place for place in (f"{self.file}{line}" if self.file else "", self.key or "") if place]
        hint = f" Did you mean {self.suggestion!r}?" if self.suggestion else ""
        return ": ".join([*places, self.message]) + hint


class MissingPackage(BusllmError):
    """A plug-in or an optional dependency that the topology names is not installed."""

    code = "missing_package"


class AlreadyRunning(BusllmError):
    """Another `busllm up` of the same cluster runs on this host."""

    code = "already_running"

    def __init__(self, cluster: str, pid: int) -> None:
        super().__init__(f"cluster {cluster!r} already runs on this host with pid {pid}; stop it first.")
        self.cluster = cluster
        self.pid = pid


class AddressUnavailable(BusllmError):
    """`frontend.listen` cannot be bound: taken, or not an address of this host."""

    code = "address_unavailable"

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"cannot listen on {address}: {reason}. Stop what uses it or change frontend.listen.")
        self.address = address
        self.reason = reason


class Superseded(BusllmError):
    """A live older instance of the same kind and index is on the bus; this one ends with exit status 3."""

    code = "superseded"


class ModelError(BusllmError):
    """A model cannot be fetched, read or served; the message gives the reason."""

    code = "model_error"


class ChecksumMismatch(ModelError):
    """A fetched file is not the one that was published."""

    code = "checksum_mismatch"


class EngineError(BusllmError):
    """The engine broke an invariant of its own; its process ends."""

    code = "engine_error"


class IntegrityError(EngineError):
    """The page accounting does not add up; the message says where."""

    code = "engine_integrity"
