"""`POST /v1/completions`.

Owns: what the fields of a completions request mean, `echo`, and the shape of its answer. Choice numbers are
prompt number * n + choice of that prompt.
Next on the path: `generation.py`, which submits it and answers.
"""

from __future__ import annotations

import time
from typing import assert_never

from busllm.errors import InvalidRequest
from busllm.messages.codec import unpack_ids
from busllm.messages.to_tokenizer import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from busllm.requests.generation import GenerationRequest
from busllm.stages.frontend.answers import Completion, CompletionChoice
from busllm.stages.frontend.bodies import CompletionBody
from busllm.stages.frontend.chunks import CompletionChunks, Head
from busllm.stages.frontend.completion_prompts import completion_prompts
from busllm.stages.frontend.decoding import BodyDecoder
from busllm.stages.frontend.generation import Gathered, UsageTally, event_stream, gather, submit
from busllm.stages.frontend.http import Answer, Request, json_response
from busllm.stages.frontend.logprobs import completion_logprobs
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

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 1024

_decoder = BodyDecoder(CompletionBody)
_REFUSED = tuple(name for name in refused_fields(CompletionBody) if name != "best_of")


async def completions(services: Services, request: Request) -> Answer:
    """Continues one or more prompts."""
    raw = await request.body()
    body, generation = await _decoder.read(raw, lambda body: completion_generation(body, services.settings))
    with_usage = wants_usage_chunk(body)
    echoes = await _echoes(services, body, generation) if body.echo else None
    output = submit(services, request, generation)
    head = Head(f"cmpl-{request.uid}", int(time.time()), services.settings.model_name, with_usage)
    tally = UsageTally(generation.n, services.metrics)
    if body.stream:
        chunks = CompletionChunks(head, echoes, generation.n, body.logprobs or 0)
        wait_s = services.settings.timings.header_wait_s
        return await event_stream(output, chunks, tally, with_usage=with_usage, header_wait_s=wait_s)
    choices = await gather(output, generation.n * len(generation.prompts), tally)
    shown = [
        _choice(choice, echoes[choice.choice // generation.n] if echoes else "", body.logprobs) for choice in choices
    ]
    return json_response(Completion(head.id, head.created, head.model, shown, tally.total()))


def completion_generation(body: CompletionBody, settings: FrontendSettings) -> GenerationRequest:
    """Makes the checked request of a completions body.

    Raises:
        RequestError: names the first field that is wrong.
    """
    check_model(body.model, settings)
    wants_usage_chunk(body)
    refuse_unsupported(body, _REFUSED)
    n = choices_per_prompt(body)
    _check_best_of(body, n)
    check_logprobs_count("logprobs", body.logprobs, settings.vocab_size)
    prompts = completion_prompts(body.prompt, settings.vocab_size)
    if n * len(prompts) > MAX_CHOICES:
        raise InvalidRequest(f"n times the number of prompts is over {MAX_CHOICES}.", param="n")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0, which is only allowed with echo: true.", param="max_tokens")
    params = sampling_params(
        body,
        settings,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    return GenerationRequest(prompts, params, n)


def _check_best_of(body: CompletionBody, n: int) -> None:
    if body.best_of is not None and (type(body.best_of) is not int or body.best_of != n):
        raise InvalidRequest("best_of other than n is not supported by this server; leave it out.", param="best_of")


async def _echoes(services: Services, body: CompletionBody, generation: GenerationRequest) -> tuple[str, ...]:
    """The text of each prompt; ids are asked back from a tokenizer stage."""
    keep_special = body.skip_special_tokens is False
    return tuple([await _echo(services, prompt, not keep_special) for prompt in generation.prompts])


async def _echo(services: Services, prompt: Prompt, skip_special_tokens: bool) -> str:
    match prompt:
        case TextPrompt(text):
            return text
        case TokenPrompt(packed):
            question = {"token_ids": unpack_ids(packed).tolist(), "skip_special_tokens": skip_special_tokens}
            answer = await services.owner.ask("tokenizer", "detokenize", question)
            return str(answer["text"])
        case ChatPrompt():
            raise AssertionError("completions have no chat prompts")
        case _:
            assert_never(prompt)


def _choice(gathered: Gathered, echo: str, num_top: int | None) -> CompletionChoice:
    logprobs = None
    if num_top is not None:
        logprobs, _ = completion_logprobs((*gathered.prompt_logprobs, *gathered.logprobs), num_top, 0)
    return CompletionChoice(gathered.choice, echo + gathered.text, gathered.finish_reason, logprobs)
