"""From the fields that both generating endpoints share to `SamplingParams`.

Owns: defaults, the forms that a field may have, fields that exclude each other, fields that are refused.
Does not know: the ranges of the numbers themselves (`busllm/sampling.py` checks them).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from busllm.errors import InvalidRequest, ModelNotFound
from busllm.sampling import MAX_LOGPROBS, SamplingParams, check_sampling
from busllm.stages.frontend.bodies import GenerationBody, Refused
from busllm.stages.frontend.grammar_fields import grammar_of
from busllm.stages.frontend.settings import FrontendSettings

MAX_N = 128
MAX_STOPS = 16
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "suffix": ("",),
}
"""Values of refused fields that ask for nothing."""


def check_model(name: str | None, settings: FrontendSettings) -> None:
    """Checks that the served model is asked for.

    Raises:
        ModelNotFound: another name.
    """
    if name is not None and name != settings.model_name:
        shown = name if len(name) <= 100 else name[:100] + "…"
        raise ModelNotFound(
            f"The model {shown!r} does not exist here; this server serves {settings.model_name!r}.", param="model"
        )


def refuse_unsupported(body: GenerationBody, names: tuple[str, ...]) -> None:
    """Refuses fields that would change the meaning of the request.

    Raises:
        InvalidRequest: names the first one that has a value which asks for something.
    """
    for name in names:
        value = getattr(body, name)
        if value is not None and value not in HARMLESS.get(name, ()):
            raise InvalidRequest(f"{name} is not supported by this server; leave it out.", param=name)


def choices_per_prompt(body: GenerationBody) -> int:
    """`n`, checked.

    Raises:
        InvalidRequest: it is out of range.
    """
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_N:
        raise InvalidRequest(f"n is {n}; it must be between 1 and {MAX_N}.", param="n")
    return n


def wants_usage_chunk(body: GenerationBody) -> bool:
    """Whether a stream ends with a chunk of token counts.

    Raises:
        InvalidRequest: stream_options without stream.
    """
    if body.stream_options is None:
        return False
    if not body.stream:
        raise InvalidRequest("stream_options is only allowed with stream: true.", param="stream_options")
    return bool(body.stream_options.include_usage)


def check_logprobs_count(name: str, count: int | None, vocab_size: int) -> None:
    """Checks a number of alternatives under the name that the client gave it.

    Raises:
        InvalidRequest: out of range.
    """
    high = min(MAX_LOGPROBS, vocab_size)
    if count is not None and not 0 <= count <= high:
        raise InvalidRequest(f"{name} is {count}; it must be between 0 and {high}.", param=name)


def sampling_params(
    body: GenerationBody,
    settings: FrontendSettings,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Makes the checked sampling settings of a request; `null` fields take the defaults of `SamplingParams`.

    Args:
        max_tokens, logprobs, prompt_logprobs: what the endpoint made of its own fields.

    Raises:
        InvalidRequest: names the first field that is wrong.
    """
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "seed": body.seed,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "skip_special_tokens": body.skip_special_tokens,
    }
    params = SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        top_k=_top_k(body.top_k, settings.vocab_size),
        max_tokens=max_tokens,
        stop=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar_of(body.response_format, body.structured_outputs),
    )
    check_sampling(params, settings.vocab_size)
    return params


def _top_k(top_k: int | None, vocab_size: int) -> int | None:
    if top_k is None or top_k in (0, -1) or top_k >= vocab_size:
        return None
    if top_k < -1:
        raise InvalidRequest(f"top_k is {top_k}; it must be at least 1, or 0 or -1 for all tokens.", param="top_k")
    return top_k


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} texts; at most {MAX_STOPS} are allowed.", param="stop")
    return stops


def _logit_bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    for key in bias or ():
        if _TOKEN_ID.fullmatch(key) is None:
            raise InvalidRequest(f"logit_bias has the key {key[:100]!r}; keys are token ids.", param="logit_bias")
    return tuple((int(key), value) for key, value in (bias or {}).items())


def refused_fields(body_type: type[msgspec.Struct]) -> tuple[str, ...]:
    """Names of the fields of a body that are declared as refused."""
    return tuple(field.name for field in msgspec.structs.fields(body_type) if field.type == Refused)
