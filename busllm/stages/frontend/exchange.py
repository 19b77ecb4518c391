"""One exchange: a request and its answer, from the first byte to the last.

Owns: when the status leaves, the watch for clients that left or do not read, the end of an exchange that the server
cuts short, what happens to a body that nobody read.
Does not know: what is answered (the handler that it is given), routes and keys (`app.py`).

An exchange ends in one of four ways. The handler's answer is sent whole. The client leaves: nothing more is sent. The
client does not read: the same. The server ends it (`stop`): a plain error if nothing was sent yet, an error event in a
stream, a cut otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import anyio
from structlog.stdlib import BoundLogger

from busllm.errors import BusllmError
from busllm.stages.frontend.errors import error_event, error_response, internal_error
from busllm.stages.frontend.http import Answer, EventStream, Header, Request, Response, Send
from busllm.stages.frontend.settings import HttpTimings

PING = b": ping\n\n"
_STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Exchange:
    """Runs a handler for a request and sends its answer.

    Args:
        request: its body is read here, whoever asks for it.
        send: ASGI's way out.
        timings: how long to wait for the client.
        headers: what every answer gets, asked when the status leaves.
        log: its lines say which frontend it is.

    Attributes:
        status: what was answered; None while nothing was.
        client_left: whether the client went, or stopped reading, before the end.
    """

    def __init__(
        self,
        request: Request,
        send: Send,
        timings: HttpTimings,
        headers: Callable[[], tuple[Header, ...]],
        log: BoundLogger,
    ) -> None:
        self.request = request
        self.status: int | None = None
        self.client_left = False
        self._send = send
        self._timings = timings
        self._headers = headers
        self._log = log
        self._streaming = False
        self._ended = False
        self._failure: BusllmError | None = None
        self._work = anyio.CancelScope()
        self._last_sent = 0.0
        self._sending_since: float | None = None

    async def run(self, handler: Callable[[Request], Awaitable[Answer]]) -> None:
        """Runs the exchange to its end; raises nothing but cancellation."""
        with self.request.cleanup:
            async with anyio.create_task_group() as group:
                group.start_soon(self.request.pump, self._leave)
                with self._work:
                    answer = await self._answer(handler)
                    if isinstance(answer, EventStream):
                        group.start_soon(self._watch_stream)
                        await self._send_stream(answer)
                    else:
                        await self._send_response(answer)
                if self._failure is not None and not self.client_left:
                    await self._send_failure(self._failure)
                group.cancel_scope.cancel()

    def stop(self, error: BusllmError) -> None:
        """Ends the exchange from the server's side with an error that the client gets, if it can still be told."""
        if not self._ended:
            self._failure = error
            self._work.cancel()

    def _leave(self) -> None:
        if not self._ended:  # the server reports a disconnect after every answer's end, too
            self.client_left = True
            self._work.cancel()

    def _give_up(self) -> None:
        self._log.info("client does not read", uid=self.request.uid, unread_s=self._timings.unread_s)
        self.client_left = True
        self._work.cancel()

    async def _answer(self, handler: Callable[[Request], Awaitable[Answer]]) -> Answer:
        try:
            return await handler(self.request)
        except BusllmError as error:
            log = self._log.warning if error.status >= 500 else self._log.info
            log("request refused", uid=self.request.uid, status=error.status, code=error.code, reason=error.message)
            return error_response(error)
        except Exception:  # noqa: BLE001 - the stage boundary: the client gets an answer, the log the traceback
            self._log.exception("request handler failed", uid=self.request.uid)
            return error_response(internal_error())

    # ---- whole answers

    async def _send_response(self, response: Response) -> None:
        headers = [(b"content-type", response.content_type)] if response.content_type else []
        if response.status != 204:
            headers.append((b"content-length", str(len(response.body)).encode()))
        lingering = not await self._body_came_soon()
        if lingering and self.request.http_version.startswith("1"):
            headers.append((b"connection", b"close"))
        with anyio.move_on_after(self._timings.unread_s):
            await self._start(response.status, (*headers, *response.headers))
            if lingering:
                # The client may still be writing. A close now would be a reset that takes the answer with it.
                await self._send({"type": "http.response.body", "body": response.body, "more_body": True})
                await self.request.wait_body_arrived(self._timings.linger_s)
                await self._end(b"")
            else:
                await self._end(response.body)
            return
        self._give_up()

    async def _body_came_soon(self) -> bool:
        """Whether the rest of the body arrived, or came in a moment: then the connection can be kept."""
        if self.request.body_arrived:
            return True
        declared = self.request.declared_bytes
        is_small = declared is not None and declared <= 256 * 1024
        return is_small and await self.request.wait_body_arrived(min(0.2, self._timings.linger_s))

    # ---- streams

    async def _send_stream(self, stream: EventStream) -> None:
        self._streaming = True
        await self._start(200, _STREAM_HEADERS)
        try:
            async with aclosing(stream.chunks) as chunks:
                async for chunk in chunks:
                    await self._write(chunk)
        except BusllmError as error:
            self._log.warning("stream failed", uid=self.request.uid, code=error.code, reason=error.message)
            await self._write(error_event(error))
        except Exception:  # noqa: BLE001 - the stage boundary: the client gets an answer, the log the traceback
            self._log.exception("stream handler failed", uid=self.request.uid)
            await self._write(error_event(internal_error()))
        await self._end(b"")

    async def _write(self, chunk: bytes) -> None:
        self._sending_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sending_since = None
        self._last_sent = time.monotonic()

    async def _watch_stream(self) -> None:
        """Sends a ping into each silence, and gives up a client that does not read.

        One task with two timers instead of a timeout around every send: thousands of sends each second are cheaper so.
        """
        while True:
            now = time.monotonic()
            if self._sending_since is not None:
                wait_s = self._sending_since + self._timings.unread_s - now
                if wait_s <= 0:
                    self._give_up()
                    return
            else:
                wait_s = self._last_sent + self._timings.ping_s - now
                if wait_s <= 0:
                    await self._write(PING)
                    continue
            # A send may begin at any moment, so nobody waits longer than the shorter time.
            await anyio.sleep(min(wait_s, self._timings.unread_s, self._timings.ping_s))

    # ---- both

    async def _start(self, status: int, headers: tuple[Header, ...]) -> None:
        self.status = status
        self._last_sent = time.monotonic()
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._headers()]})

    async def _end(self, body: bytes) -> None:
        self._ended = True
        self._sending_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_failure(self, error: BusllmError) -> None:
        with anyio.move_on_after(self._timings.stop_s):
            if self.status is None:
                await self._send_response(error_response(error))
            elif self._streaming:
                await self._write(error_event(error))
                await self._end(b"")
