"""Cross-origin requests from browsers (the CORS protocol of the Fetch standard).

Owns: the answer to a preflight, and the headers that let a page read an answer.
Does not know: keys (a preflight carries none and needs none), routes.
"""

from __future__ import annotations

from busllm.stages.frontend.http import Header, Request, Response

_MAX_AGE_S = 600


class Cors:
    """The origins that may call from a browser.

    Args:
        origins: as browsers send them (`https://chat.example`); `*` = any; empty = none, CORS is off.
    """

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origin.rstrip("/").encode("latin-1", "replace") for origin in origins)

    @property
    def offered(self) -> bool:
        """Whether any origin is allowed."""
        return bool(self._origins)

    def headers(self, request: Request) -> tuple[Header, ...]:
        """What every answer to this request gets."""
        if not self.offered:
            return ()
        origin = request.header(b"origin")
        if origin is None or not self._allows(origin):
            return ((b"vary", b"origin"),)
        return (
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"origin"),
        )

    def is_preflight(self, request: Request) -> bool:
        """Whether a browser asks if it may send what comes next."""
        return (
            self.offered
            and request.method == "OPTIONS"
            and request.header(b"origin") is not None
            and request.header(b"access-control-request-method") is not None
        )

    def preflight(self, request: Request, methods: tuple[str, ...]) -> Response:
        """Answers a preflight; an origin that is not allowed gets no permission, and the browser stops there."""
        origin = request.header(b"origin")
        if origin is None or not self._allows(origin):
            return Response(b"", 204, b"")
        wanted = request.header(b"access-control-request-headers") or b"authorization, content-type"
        return Response(
            b"",
            204,
            b"",
            (
                (b"access-control-allow-methods", ", ".join(methods).encode()),
                (b"access-control-allow-headers", wanted),
                (b"access-control-max-age", str(_MAX_AGE_S).encode()),
            ),
        )

    def _allows(self, origin: bytes) -> bool:
        return b"*" in self._origins or origin in self._origins
