"""The real HTTP frontend on a free loopback port, in the test's own event loop.

Owns: its start and its end.
Does not know: what stands behind it: any owner of requests, a fake or a real one.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.abc
import httpx

from busllm.requests.protocol import Owner
from busllm.stages.frontend.app import FrontendApp, build_app
from busllm.stages.frontend.server import serve
from busllm.stages.frontend.settings import FrontendSettings
from busllm.topology.address import Address, bind

MODEL = "org/fake-model"


def fake_settings(**changes: object) -> FrontendSettings:
    """Settings for a fake model of byte tokens."""
    fields: dict[str, object] = {"model_name": MODEL, "max_model_len": 8192, "vocab_size": 259, "created": 1}
    return FrontendSettings(**{**fields, **changes})  # type: ignore[arg-type]


@dataclass(frozen=True)
class FrontendServer:
    """A running frontend.

    Attributes:
        app: the application.
        client: for requests; its base URL is the server's.
        port: on 127.0.0.1.
        shutdown: setting it begins the drain.
        hurry: setting it ends the drain at once.
        stopped: set when the server has ended.
    """

    app: FrontendApp
    client: httpx.AsyncClient
    port: int
    shutdown: anyio.Event
    hurry: anyio.Event
    stopped: anyio.Event

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def connect(self) -> anyio.abc.SocketStream:
        """A raw connection, for what no HTTP client sends."""
        return await anyio.connect_tcp("127.0.0.1", self.port)

    async def exchange_bytes(self, raw: bytes) -> bytes:
        """Sends bytes on a connection of their own and reads until the server closes it."""
        async with await self.connect() as stream:
            await stream.send(raw)
            return await read_all(stream)


async def read_all(stream: anyio.abc.SocketStream) -> bytes:
    """Reads until the other side closes."""
    received = b""
    try:
        while True:
            received += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return received


@asynccontextmanager
async def serving(owner: Owner, settings: FrontendSettings | None = None) -> AsyncIterator[FrontendServer]:
    """Runs a frontend; its end waits for the drain."""
    settings = settings or fake_settings()
    app = build_app(owner, settings)
    listener = bind(Address("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    shutdown, hurry, stopped = anyio.Event(), anyio.Event(), anyio.Event()
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client,
        anyio.create_task_group() as group,
    ):
        await group.start(_serve, app, listener, settings, shutdown, hurry, stopped)
        try:
            yield FrontendServer(app, client, port, shutdown, hurry, stopped)
        finally:
            shutdown.set()
            hurry.set()
            with anyio.CancelScope(shield=True):
                await stopped.wait()


async def _serve(
    app: FrontendApp,
    listener: socket.socket,
    settings: FrontendSettings,
    shutdown: anyio.Event,
    hurry: anyio.Event,
    stopped: anyio.Event,
    *,
    task_status: anyio.abc.TaskStatus[None],
) -> None:
    try:
        await serve(app, [listener], settings, shutdown, hurry=hurry, task_status=task_status)
    finally:
        stopped.set()
