"""`GET /v1/models` and `GET /v1/models/{id}`.

Owns: what a client is told about the served model. It is not told before the model can answer.
"""

from __future__ import annotations

from busllm.stages.frontend.answers import Model, ModelList
from busllm.stages.frontend.health import check_ready
from busllm.stages.frontend.http import Answer, Request, json_response
from busllm.stages.frontend.sampling_fields import check_model
from busllm.stages.frontend.services import Services


async def list_models(services: Services, request: Request) -> Answer:
    """The one served model."""
    check_ready(services)
    return json_response(ModelList([_model(services)]))


async def show_model(services: Services, request: Request) -> Answer:
    """A model by its id, which may have slashes."""
    check_model(request.path_argument, services.settings)
    check_ready(services)
    return json_response(_model(services))


def _model(services: Services) -> Model:
    settings = services.settings
    return Model(settings.model_name, settings.created, settings.max_model_len)
