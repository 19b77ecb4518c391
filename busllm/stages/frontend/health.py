"""`GET /health` (this process lives), `GET /ready` (a request would be served now), `GET /metrics`.

Owns: the difference between living and ready.
Does not know: what makes the server ready (the owner of requests does).
"""

from __future__ import annotations

from busllm.errors import Draining, Unavailable
from busllm.stages.frontend.answers import Status
from busllm.stages.frontend.http import Answer, Request, Response, json_response
from busllm.stages.frontend.metrics import CONTENT_TYPE
from busllm.stages.frontend.services import Services


def check_ready(services: Services) -> None:
    """Checks that a request would be served now.

    Raises:
        Draining: this frontend is shutting down.
        Unavailable: a stage is missing or still loading; the message says which.
    """
    if services.running.draining:
        raise Draining("The server is shutting down.")
    reason = services.owner.unready_reason()
    if reason is not None:
        raise Unavailable(f"The server is not ready: {reason}")


async def health(services: Services, request: Request) -> Answer:
    """200 as long as this process answers."""
    return json_response(Status("ok"))


async def ready(services: Services, request: Request) -> Answer:
    """200 when every stage that a request needs is up, else 503 with the reason."""
    check_ready(services)
    return json_response(Status("ready"))


async def metrics(services: Services, request: Request) -> Answer:
    """Counters, gauges and histograms for Prometheus."""
    return Response(services.metrics.text(), content_type=CONTENT_TYPE)
