"""What the server cannot do now, though the request is right; and what came over the bus as an error."""

from __future__ import annotations

from busllm.errors.root import BusllmError


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
