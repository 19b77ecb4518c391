"""The root of the error tree.

Owns: what every error has: a stable `code`, the HTTP status and OpenAI type that it becomes, and whether another try
may succeed.
Does not know: which errors there are.
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
