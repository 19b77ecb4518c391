"""`POST /v1/chat/completions`.

Owns: what the fields of a chat request mean, and the shape of its answer.
Next on the path: `generation.py`, which submits it and answers.
"""

from __future__ import annotations

import time

from busllm.errors import InvalidRequest
from busllm.messages.to_tokenizer import ChatPrompt
from busllm.requests.generation import GenerationRequest
from busllm.stages.frontend.answers import ChatAnswer, ChatChoice, ChatCompletion, ChatLogprobs
from busllm.stages.frontend.bodies import ChatBody
from busllm.stages.frontend.chat_messages import chat_prompt
from busllm.stages.frontend.chunks import ChatChunks, Head
from busllm.stages.frontend.decoding import BodyDecoder
from busllm.stages.frontend.generation import Gathered, UsageTally, event_stream, gather, submit
from busllm.stages.frontend.http import Answer, Request, json_response
from busllm.stages.frontend.logprobs import chat_tokens
from busllm.stages.frontend.sampling_fields import (
    check_logprobs_count,
    check_model,
    choices_per_prompt,
    refuse_unsupported,
    refused_fields,
    sampling_params,
    wants_usage_chunk,
)
from busllm.stages.frontend.services import Services
from busllm.stages.frontend.settings import FrontendSettings

_decoder = BodyDecoder(ChatBody)
_REFUSED = refused_fields(ChatBody)
_REFUSED_WITHOUT_TOOLS = tuple(name for name in _REFUSED if name not in ("tools", "tool_choice"))


async def chat_completions(services: Services, request: Request) -> Answer:
    """Answers a conversation."""
    raw = await request.body()
    body, generation = await _decoder.read(raw, lambda body: chat_generation(body, services.settings))
    with_usage = wants_usage_chunk(body)
    output = submit(services, request, generation)
    head = Head(f"chatcmpl-{request.uid}", int(time.time()), services.settings.model_name, with_usage)
    tally = UsageTally(generation.n, services.metrics)
    if body.stream:
        wait_s = services.settings.timings.header_wait_s
        return await event_stream(output, ChatChunks(head), tally, with_usage=with_usage, header_wait_s=wait_s)
    choices = await gather(output, generation.n, tally)
    shown = [_choice(choice, with_logprobs=bool(body.logprobs)) for choice in choices]
    return json_response(ChatCompletion(head.id, head.created, head.model, shown, tally.total()))


def chat_generation(body: ChatBody, settings: FrontendSettings) -> GenerationRequest:
    """Makes the checked request of a chat body.

    Raises:
        RequestError: names the first field that is wrong.
    """
    check_model(body.model, settings)
    wants_usage_chunk(body)
    refuse_unsupported(body, _REFUSED_WITHOUT_TOOLS if body.tool_choice == "none" else _REFUSED)
    n = choices_per_prompt(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs is only allowed with logprobs: true.", param="top_logprobs")
    check_logprobs_count("top_logprobs", body.top_logprobs, settings.vocab_size)
    params = sampling_params(
        body, settings, max_tokens=_max_tokens(body), logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )
    return GenerationRequest((_prompt(body, settings),), params, n)


def _prompt(body: ChatBody, settings: FrontendSettings) -> ChatPrompt:
    prompt = chat_prompt(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
    if not settings.has_chat_template:
        raise InvalidRequest(
            "This model has no chat template; use /v1/completions, or serve the model with one.", param="messages"
        )
    return prompt


def _max_tokens(body: ChatBody) -> int | None:
    """The limit under either of its names.

    Raises:
        InvalidRequest: they differ, or the limit is below 1.
    """
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_completion_tokens is {new} and max_tokens is {old}; give one of them.", param="max_completion_tokens"
        )
    limit = old if new is None else new
    name = "max_tokens" if new is None else "max_completion_tokens"
    if limit is not None and not 1 <= limit < 2**31:
        raise InvalidRequest(f"{name} is {limit}; it must be between 1 and {2**31 - 1}.", param=name)
    return limit


def _choice(gathered: Gathered, *, with_logprobs: bool) -> ChatChoice:
    logprobs = ChatLogprobs(chat_tokens(gathered.logprobs)) if with_logprobs else None
    return ChatChoice(gathered.choice, ChatAnswer(gathered.text), gathered.finish_reason, logprobs)
