"""The frontend as an actor: an owner of requests with HTTP in front of it.

Owns: the HTTP server's life beside the actor's. HTTP answers from the first moment (503 with the reason until all is
up), even while the bus cannot be reached, so the server runs beside the actor and not inside it.
Does not know: how requests live (`requests/`), what endpoints do (`app.py`).
Next on the path: `stages/tokenizer.py`.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.abc

from busllm.actors.actor import Actor
from busllm.requests.owner import RequestOwner
from busllm.requests.owner_behaviour import OwnerBehaviour
from busllm.stages.frontend.app import build_app
from busllm.stages.frontend.server import serve
from busllm.stages.frontend.settings import FrontendSettings


class FrontendStage(OwnerBehaviour):
    """Behaviour of a frontend actor."""

    def __init__(self, settings: FrontendSettings, sockets: Sequence[socket.socket], owner: RequestOwner) -> None:
        super().__init__("frontend", owner, is_unique=True)
        self._settings = settings
        self._sockets = sockets
        self._app = build_app(owner, settings)
        self._shutdown = anyio.Event()
        self._served = anyio.Event()

    async def serve_http(
        self, hurry: anyio.Event, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Serves HTTP until `stop_http`, or the actor's drain, and what runs has finished."""
        try:
            await serve(self._app, self._sockets, self._settings, self._shutdown, hurry=hurry, task_status=task_status)
        finally:
            self._served.set()

    async def stop_http(self) -> None:
        """Refuses what is new, lets finish what runs, then closes the listener."""
        self._shutdown.set()
        await self._served.wait()

    async def start(self, actor: Actor) -> None:
        """See `Behaviour`."""
        self._app.name_instance(actor.instance)
        await super().start(actor)

    def statistics(self) -> dict[str, Any]:
        """See `Behaviour`."""
        return {**super().statistics(), "http_exchanges": len(self._app.running)}

    async def drain(self) -> None:
        """See `Behaviour`: the HTTP exchanges first, then the requests behind them."""
        await self.stop_http()
        await super().drain()
