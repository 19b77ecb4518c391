"""The endpoints: which path and method leads to which handler, and what goes in and out there.

Owns: the one table that routing and the OpenAPI document are both made of.
Does not know: how an exchange runs (`exchange.py`), keys (`auth.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from busllm.stages.frontend.answers import (
    ChatCompletion,
    Completion,
    DetokenizedText,
    Model,
    ModelList,
    Status,
    Tokens,
)
from busllm.stages.frontend.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from busllm.stages.frontend.chat import chat_completions
from busllm.stages.frontend.completions import completions
from busllm.stages.frontend.health import health, metrics, ready
from busllm.stages.frontend.http import Answer, Request
from busllm.stages.frontend.models import list_models, show_model
from busllm.stages.frontend.services import Services
from busllm.stages.frontend.tokenization import detokenize, tokenize

Handler = Callable[[Services, Request], Awaitable[Answer]]


@dataclass(frozen=True)
class Route:
    """One endpoint.

    Attributes:
        method: GET (HEAD comes with it) or POST.
        path: its last part may be `{id}`, which takes the rest of the path with its slashes.
        handler: answers it; its docstring is what the OpenAPI document says.
        body, answer: Structs of what goes in and out; None = no body, or no JSON.
        streams: whether the answer may be a stream of events.
        needs_key: whether an API key is needed when there are some.
        while_draining: whether it is answered during a drain.
    """

    method: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    streams: bool = False
    needs_key: bool = True
    while_draining: bool = False


ENDPOINTS = (
    Route("POST", "/v1/chat/completions", chat_completions, ChatBody, ChatCompletion, streams=True),
    Route("POST", "/v1/completions", completions, CompletionBody, Completion, streams=True),
    Route("GET", "/v1/models", list_models, answer=ModelList),
    Route("GET", "/v1/models/{id}", show_model, answer=Model),
    Route("POST", "/tokenize", tokenize, TokenizeBody, Tokens),
    Route("POST", "/detokenize", detokenize, DetokenizeBody, DetokenizedText),
    Route("GET", "/health", health, answer=Status, needs_key=False, while_draining=True),
    Route("GET", "/ready", ready, answer=Status, needs_key=False, while_draining=True),
    Route("GET", "/metrics", metrics, while_draining=True),
)


class Router:
    """Finds the endpoint of a request.

    Args:
        routes: all endpoints; one method per path.
    """

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._exact = {route.path: route for route in routes if "{" not in route.path}
        self._open = {route.path.partition("{")[0]: route for route in routes if "{" in route.path}

    def find(self, request: Request) -> Route | None:
        """The endpoint of a request, noted in the request with what stands in the place of its `{…}`; None = none."""
        route = self._exact.get(request.path)
        if route is None:
            for prefix, candidate in self._open.items():
                if request.path.startswith(prefix) and len(request.path) > len(prefix):
                    route, request.path_argument = candidate, request.path[len(prefix) :]
        if route is not None:
            request.endpoint = route.path
        return route


def allowed_methods(route: Route) -> tuple[str, ...]:
    """The methods of an endpoint."""
    return ("GET", "HEAD") if route.method == "GET" else (route.method,)
