"""What is wrong with a request: answered with a 4xx, and sending it again unchanged does not help."""

from __future__ import annotations

from busllm.errors.root import BusllmError


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

    def __init__(self, num_prompt_tokens: int, max_context_tokens: int, param: str = "prompt") -> None:
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
            param="prompt",
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
    """The HTTP body is larger than `frontend.max_body_bytes`."""

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
