"""Hypercorn, run in our task group with our own end.

Owns: the listening sockets, hypercorn's settings, the order of a shutdown. The only file of the stages that reaches
asyncio, through hypercorn.
Does not know: what is served.

Shutdown: new requests are refused with the listener open, what runs may finish within `drain_timeout_s`, what is left
then is ended with an error, and only when nothing runs is hypercorn told to stop. Its own shutdown would cut streams
that are silent for three seconds, so it never gets to cut any.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config

from busllm.stages.frontend.app import FrontendApp
from busllm.stages.frontend.settings import FrontendSettings

BACKLOG = 1024
_UNLIMITED_REQUESTS = 2**31 - 1


async def serve(
    app: FrontendApp,
    sockets: Sequence[socket.socket],
    settings: FrontendSettings,
    shutdown: anyio.Event,
    *,
    hurry: anyio.Event | None = None,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until the shutdown is over.

    Args:
        app: from `build_app`.
        sockets: bound TCP sockets; they belong to this function from now on.
        settings: the same that the app has.
        shutdown: set by the caller to begin the drain.
        hurry: set by the caller to end the drain at once.
    """
    for sock in sockets:
        sock.listen(BACKLOG)
        _end_dead_connections(sock, settings.timings.unread_s)
    stop = anyio.Event()
    config = _config(sockets, settings)
    async with anyio.create_task_group() as group:
        group.start_soon(_run_hypercorn, app, config, stop)
        task_status.started()
        try:
            await shutdown.wait()
            await _drain(app, settings, hurry or anyio.Event())
        finally:  # also when cancelled: hypercorn itself is shielded and ends only by this
            app.running.end_all()
            stop.set()


async def _drain(app: FrontendApp, settings: FrontendSettings, hurry: anyio.Event) -> None:
    app.running.begin_drain()
    app.log.info("drain began", running=len(app.running), drain_timeout_s=settings.drain_timeout_s)
    with anyio.move_on_after(settings.drain_timeout_s):
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when, hurry, group.cancel_scope)
            await app.running.wait_finished()
            group.cancel_scope.cancel()
    if len(app.running):
        app.log.warning("drain ends requests that run", running=len(app.running))
    app.running.end_all()
    with anyio.move_on_after(settings.timings.stop_s):
        await app.running.wait_finished()


async def _run_hypercorn(app: FrontendApp, config: Config, stop: anyio.Event) -> None:
    with anyio.CancelScope(shield=True) as shielded:
        async with anyio.create_task_group() as group:
            group.start_soon(_last_resort, stop, config.graceful_timeout, shielded)
            with _broken_connections_are_no_faults(app):
                await hypercorn_serve(app, config, shutdown_trigger=stop.wait, mode="asgi")  # type: ignore[arg-type]
                await anyio.lowlevel.checkpoint()  # the last connections' callbacks
            group.cancel_scope.cancel()


async def _last_resort(stop: anyio.Event, graceful_timeout_s: float, scope: anyio.CancelScope) -> None:
    """Ends hypercorn when it does not end by itself: from Python 3.12 on it waits for connections without a limit, and
    one whose client does not read may take as long as it likes."""
    await stop.wait()
    await anyio.sleep(2 * graceful_timeout_s)
    scope.cancel()


@contextmanager
def _broken_connections_are_no_faults(app: FrontendApp) -> Iterator[None]:
    """Keeps connections that the kernel gave up, and handshakes that failed, out of the log of unhandled errors.

    Hypercorn lets them pass, so they would end as a traceback each in the event loop's exception handler.
    """
    loop = asyncio.get_running_loop()
    previous = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        was_cut = isinstance(error, asyncio.CancelledError)  # by hypercorn, at the end of its grace time
        if was_cut or ("transport" in context and error is not None and _is_broken_connection(error)):
            app.log.debug("connection broke", reason=str(error))
        elif previous is not None:
            previous(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
    try:
        yield
    finally:
        loop.set_exception_handler(previous)


def _is_broken_connection(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_broken_connection(inner) for inner in error.exceptions)
    return isinstance(error, OSError)  # a connection's errors, SSL's included


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _end_dead_connections(sock: socket.socket, unread_s: float) -> None:
    """Lets the kernel end connections whose peer takes nothing for that long; accepted sockets inherit it."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, option, int(unread_s * 1000))


def _config(sockets: Sequence[socket.socket], settings: FrontendSettings) -> Config:
    config = Config()
    config.bind = [f"fd://{sock.detach()}" for sock in sockets]
    config.backlog = BACKLOG
    config.errorlog = logging.getLogger("busllm.http")
    config.errorlog.setLevel(logging.WARNING)  # that it listens is told by the ready line, when it would serve
    config.accesslog = None
    config.include_server_header = False
    # The parser refuses without a word to the log, so the app's own check comes first; this bounds the memory.
    config.h11_max_incomplete_size = 4 * settings.max_head_bytes
    # Counts from the connection's start, or the last answer's end, to the end of the next request's head.
    config.keep_alive_timeout = settings.timings.keep_alive_s
    config.keep_alive_max_requests = _UNLIMITED_REQUESTS
    config.ssl_handshake_timeout = settings.timings.keep_alive_s
    config.graceful_timeout = settings.timings.stop_s
    config.alpn_protocols = ["http/1.1"]
    if settings.tls is not None:
        config.certfile = settings.tls.certificate
        config.keyfile = settings.tls.key
        if settings.tls.client_authorities is not None:
            config.ca_certs = settings.tls.client_authorities
            config.verify_mode = ssl.CERT_REQUIRED
    return config
