"""`GET /openapi.json`: the OpenAPI 3.1 document, made of the types that are really decoded and encoded.

Owns: the form of the document.
Does not know: fields (the Structs of `bodies.py` and `answers.py` have their names, types and descriptions).
"""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

import msgspec

from busllm.stages.frontend.errors import ErrorEnvelope
from busllm.stages.frontend.http import Answer, Request, Response
from busllm.stages.frontend.routes import Handler, Route
from busllm.stages.frontend.services import Services

_REFERENCE = "#/components/schemas/{name}"


def document_route(routes: tuple[Route, ...]) -> Route:
    """The endpoint that serves the document of the others and of itself."""
    handler = _handler(routes)
    return Route("GET", "/openapi.json", handler)


def _handler(routes: tuple[Route, ...]) -> Handler:
    encoded: list[bytes] = []

    async def openapi(services: Services, request: Request) -> Answer:
        """The OpenAPI document of this server."""
        if not encoded:  # made when first asked for: starting does not wait for it
            encoded.append(msgspec.json.encode(openapi_document((*routes, Route("GET", "/openapi.json", openapi)))))
        return Response(encoded[0])

    return openapi


def openapi_document(routes: tuple[Route, ...]) -> dict[str, Any]:
    """Makes the document of all endpoints."""
    types = [kind for route in routes for kind in (route.body, route.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components([*types, ErrorEnvelope], ref_template=_REFERENCE)
    references = dict(zip(types, schemas, strict=False))
    paths: dict[str, Any] = {}
    for route in routes:
        paths[route.path] = {route.method.lower(): _operation(route, references, schemas[-1])}
    return {
        "openapi": "3.1.0",
        "info": {"title": "busllm", "version": importlib.metadata.version("busllm")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, references: dict[Any, Any], error: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer is not None:
        content["application/json"] = {"schema": references[route.answer]}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": inspect.getdoc(route.handler) or route.path,
        "responses": {
            "200": {"description": "The answer.", **({"content": content} if content else {})},
            "default": {"description": "An error.", "content": {"application/json": {"schema": error}}},
        },
        "security": [{}, {"key": []}] if route.needs_key else [],
    }
    if route.body is not None:
        schema = {"schema": references[route.body]}
        operation["requestBody"] = {"required": True, "content": {"application/json": schema}}
    if "{" in route.path:
        name = route.path.partition("{")[2].rstrip("}")
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation
