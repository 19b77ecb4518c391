"""HTTP as this package sees it, over raw ASGI: a request with its body, an answer, a stream of events.

Owns: reading a request, with all its limits; the two forms that an answer can have.
Does not know: when an answer is sent and what ends it early (`exchange.py`), which paths there are (`app.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import ExitStack
from typing import Any

import anyio
import msgspec

from busllm.errors import BodyTooLarge, HeadTooLarge, RequestTimeout, UnsupportedMediaType
from busllm.ids import new_uid

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON = b"application/json"
UTF_8_NAMES = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})


class Response(msgspec.Struct, frozen=True):
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: tuple[Header, ...] = ()


class EventStream(msgspec.Struct, frozen=True):
    """An answer as server-sent events; each item is one or more whole events, sent at once.

    What the iterator raises becomes one error event, because the status has left already.
    """

    chunks: AsyncGenerator[bytes, None]


Answer = Response | EventStream


def json_response(answer: Any, status: int = 200) -> Response:
    """Encodes a Struct (or plain containers) as a JSON answer."""
    return Response(msgspec.json.encode(answer), status)


class Request:
    """A request: its head at once, its body when asked for.

    Attributes:
        uid: drawn for this exchange; the uid of the submitted request once there is one.
        endpoint: path of the route that it takes, once that is known.
        path_argument: what stood in the place of `{…}` in the route's path.
        cleanup: callbacks that run when the exchange ends, however it ends.
    """

    def __init__(self, scope: Scope, receive: Receive, *, max_body_bytes: int, body_wait_s: float) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.http_version: str = scope["http_version"]
        self.uid: str = new_uid()
        self.endpoint: str | None = None
        self.path_argument = ""
        self.cleanup = ExitStack()
        self._headers: list[Header] = list(scope["headers"])
        self._num_head_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        self._num_head_bytes += sum(len(name) + len(value) for name, value in self._headers)
        self._receive = receive
        self._max_body_bytes = max_body_bytes
        self._body_wait_s = body_wait_s
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._whole = anyio.Event()
        self._decided = anyio.Event()
        if self.declared_bytes == 0:
            self._whole.set()
            self._decided.set()

    def header(self, name: bytes) -> bytes | None:
        """The value of a header; several of one name become one list, as RFC 9110 (5.3) joins them."""
        values = [value for key, value in self._headers if key.lower() == name]
        return b", ".join(values) if values else None

    def check_head(self, max_bytes: int) -> None:
        """Checks the size of the request line and the headers.

        Raises:
            HeadTooLarge: it is over the limit.
        """
        if self._num_head_bytes > max_bytes:
            raise HeadTooLarge(self._num_head_bytes, max_bytes)

    @property
    def declared_bytes(self) -> int | None:
        """The body's length as the head declares it; None where it does not say (chunked, HTTP/2)."""
        declared = self.header(b"content-length")
        if declared is not None:
            return int(declared)
        is_open = self.header(b"transfer-encoding") is not None or not self.http_version.startswith("1")
        return None if is_open else 0

    @property
    def body_arrived(self) -> bool:
        """Whether nothing of this request is still to be read."""
        return self._whole.is_set()

    async def pump(self, on_disconnect: Callable[[], None]) -> None:
        """Receives until the client has left: keeps the body up to the limit, throws away what is beyond.

        It runs as long as the exchange, so that a disconnect is seen at any point and a body that nobody wants never
        blocks the connection.
        """
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                on_disconnect()
                return
            chunk = event.get("body", b"")
            self._num_bytes += len(chunk)
            if self._num_bytes > self._max_body_bytes:
                self._chunks.clear()
                self._decided.set()
            elif chunk:
                self._chunks.append(chunk)
            if not event.get("more_body", False):
                self._whole.set()
                self._decided.set()

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            UnsupportedMediaType: it is declared as something other than JSON in UTF-8.
            BodyTooLarge: it is, or is declared as, over the limit.
            RequestTimeout: it did not arrive in time.
        """
        self._check_content_type()
        declared = self.declared_bytes
        if declared is not None and declared > self._max_body_bytes:
            raise BodyTooLarge(declared, self._max_body_bytes)
        with anyio.move_on_after(self._body_wait_s):
            await self._decided.wait()
        if self._num_bytes > self._max_body_bytes:
            raise BodyTooLarge(None, self._max_body_bytes)
        if not self._whole.is_set():
            raise RequestTimeout(self._body_wait_s)
        whole = b"".join(self._chunks)
        self._chunks.clear()
        return whole

    async def wait_body_arrived(self, wait_s: float) -> bool:
        """Waits a while for the rest of a body that is thrown away; returns whether it came."""
        with anyio.move_on_after(wait_s):
            await self._whole.wait()
        return self._whole.is_set()

    def _check_content_type(self) -> None:
        declared = (self.header(b"content-type") or JSON).decode("latin-1")
        kind, *options = (part.strip().lower() for part in declared.split(";"))
        charsets = [option.removeprefix("charset=").strip('"') for option in options if option.startswith("charset=")]
        is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
        if not is_json or any(charset not in UTF_8_NAMES for charset in charsets):
            raise UnsupportedMediaType(
                f"Content-Type is {declared[:100]!r}; the body must be JSON in UTF-8, sent as application/json."
            )
