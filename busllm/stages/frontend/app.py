"""The ASGI application: what every request goes through before its endpoint, and what every answer gets.

Owns: the order of the checks (head, method, key, path, drain), the headers of every answer, the counting of exchanges.
Does not know: sockets (`server.py`), what endpoints do.
"""

from __future__ import annotations

import time
from functools import partial

from busllm.errors import Draining, MethodNotAllowed, NotFound
from busllm.requests.protocol import Owner
from busllm.stages.frontend.auth import ApiKeys
from busllm.stages.frontend.cors import Cors
from busllm.stages.frontend.exchange import Exchange
from busllm.stages.frontend.http import Answer, Header, Receive, Request, Scope, Send
from busllm.stages.frontend.metrics import FrontendMetrics
from busllm.stages.frontend.openapi import document_route
from busllm.stages.frontend.routes import ENDPOINTS, Router, allowed_methods
from busllm.stages.frontend.running import RunningExchanges
from busllm.stages.frontend.services import Services
from busllm.stages.frontend.settings import FrontendSettings
from busllm.telemetry.logging import get_logger

_NO_ENDPOINT = "other"


class FrontendApp:
    """The frontend as an ASGI application; `build_app` makes it.

    Attributes:
        running: the exchanges under way.
        log: of everything about HTTP in this frontend.
    """

    def __init__(self, services: Services) -> None:
        self.running = services.running
        self.log = get_logger("busllm.frontend", stage="frontend")
        self._services = services
        self._settings = services.settings
        self._keys = ApiKeys(services.settings.api_keys)
        self._cors = Cors(services.settings.cors_origins)
        self._router = Router((*ENDPOINTS, document_route(ENDPOINTS)))

    def name_instance(self, instance: str) -> None:
        """Says in every log line from now on which instance it is; HTTP is served before there is one."""
        self.log = self.log.bind(instance=instance)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one exchange."""
        match scope["type"]:
            case "http":
                await self._serve(scope, receive, send)
            case "websocket":
                await send({"type": "websocket.close"})
            case _:
                return  # lifespan: nothing to do

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_at = time.monotonic()
        timings = self._settings.timings
        request = Request(scope, receive, max_body_bytes=self._settings.max_body_bytes, body_wait_s=timings.body_wait_s)
        exchange = Exchange(request, send, timings, partial(self._headers, request), self.log)
        metrics = self._services.metrics
        with self.running.entered(exchange), metrics.in_flight.track_inprogress():
            try:
                await exchange.run(self._handle)
            finally:
                seconds = time.monotonic() - began_at
                endpoint = request.endpoint or _NO_ENDPOINT
                metrics.answered(endpoint, exchange.status, seconds)
                self.log.debug(
                    "request",
                    uid=request.uid,
                    endpoint=endpoint,
                    status=exchange.status,
                    client_left=exchange.client_left,
                    elapsed_ms=round(seconds * 1000, 1),
                )

    async def _handle(self, request: Request) -> Answer:
        request.check_head(self._settings.max_head_bytes)
        route = self._router.find(request)
        if route is not None and self._cors.is_preflight(request):
            return self._cors.preflight(request, allowed_methods(route))
        if route is not None and request.method not in allowed_methods(route):
            raise MethodNotAllowed(request.method, request.path[:200], allowed_methods(route))
        if route is None or route.needs_key:
            self._keys.check(request.header(b"authorization"))
        if route is None:
            raise NotFound(f"There is nothing at {request.path[:200]!r}. GET /openapi.json shows what there is.")
        if self.running.draining and not route.while_draining:
            raise Draining("The server is shutting down. Send the request again; another instance will take it.")
        return await route.handler(self._services, request)

    def _headers(self, request: Request) -> tuple[Header, ...]:
        headers: tuple[Header, ...] = ((b"x-request-id", request.uid.encode()), *self._cors.headers(request))
        if self.running.draining and request.http_version.startswith("1"):
            headers += ((b"connection", b"close"),)
        return headers


def build_app(owner: Owner, settings: FrontendSettings) -> FrontendApp:
    """Makes the frontend's ASGI application.

    Args:
        owner: what requests are submitted to.
        settings: what is served and how.
    """
    return FrontendApp(Services(owner, settings, FrontendMetrics(owner.peers), RunningExchanges()))
