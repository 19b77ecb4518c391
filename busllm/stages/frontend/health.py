"""`GET /health` (this process lives), `GET /ready` (a request would be served now), `GET /metrics`.

Owns: the difference between living and ready.
Does not know: what makes the server ready (the owner of requests does).
"""

from __future__ import annotations

from busllm.errors import Draining, Unavailable
from busllm.stages.frontend.answers import Status
from busllm.stages.frontend.errors import error_response
from busllm.stages.frontend.http import Answer, Request, Response, json_response
from busllm.stages.frontend.metrics import CONTENT_TYPE
from busllm.stages.frontend.services import Services


def why_unready(services: Services) -> Unavailable | None:
    """Why a request would not be served now: the server is shutting down, or a stage is missing or still loading."""
    if services.running.draining:
        return Draining("The server is shutting down.")
    reason = services.owner.unready_reason()
    return None if reason is None else Unavailable(f"The server is not ready: {reason}")


def check_ready(services: Services) -> None:
    """Checks that a request would be served now.

    Raises:
        Unavailable: it would not.
    """
    error = why_unready(services)
    if error is not None:
        raise error


async def health(services: Services, request: Request) -> Answer:
    """200 as long as this process answers."""
    return json_response(Status("ok"))


async def ready(services: Services, request: Request) -> Answer:
    """200 when every stage that a request needs is up, else 503 with the reason."""
    error = why_unready(services)  # an answer like any other: a probe that hears it is no failure to log
    return json_response(Status("ready")) if error is None else error_response(error)


async def metrics(services: Services, request: Request) -> Answer:
    """Counters, gauges and histograms for Prometheus."""
    return Response(services.metrics.text(), content_type=CONTENT_TYPE)
