"""The bodies that clients send, one typed Struct per endpoint.

Owns: the names and types of every field, with the sentence that documents each (the OpenAPI document shows them).
Does not know: ranges (`busllm/sampling.py`), how a body is decoded (`decoding.py`), what a field means
(`sampling_fields.py`, `grammar_fields.py`, `chat.py`, `completions.py`).

A field is in one of three groups. Applied: it does what it says. Without effect: part of OpenAI's API, and leaving it
out changes nothing in the text; it is accepted so that clients work. Refused: it would change the meaning and is not
there; any value but the harmless one is an error that names it. What is in none of them is an unknown field, also an
error. `null` always means "not given".
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from busllm.stages.frontend.grammar_fields import ResponseFormat, StructuredOutputs


def _limits(description: str, low: float | None = None, high: float | None = None) -> Meta:
    """Documents a range; it is checked in one place, `check_sampling`, and not by the decoder."""
    schema = {key: value for key, value in (("minimum", low), ("maximum", high)) if value is not None}
    return Meta(description=description, extra_json_schema=schema or None)


Switch = bool | None
Count = int | None
Number = float | None
WithoutEffect = Annotated[Any, Meta(description="Accepted, without effect.")]
Refused = Annotated[Any, Meta(description="Not supported; only null and values that change nothing are accepted.")]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: Annotated[Switch, Meta(description="One more chunk at the end has the token counts.")] = None
    include_obfuscation: WithoutEffect = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both generating endpoints share."""

    model: Annotated[str, Meta(description="The served model's name.")]
    stream: Annotated[Switch, Meta(description="Answer as server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Only with stream.")] = None
    n: Annotated[Count, _limits("Answers per prompt.", 1, 128)] = None
    max_tokens: Annotated[Count, _limits("Limit of generated tokens.", 0)] = None
    min_tokens: Annotated[Count, _limits("No end before that many generated tokens.", 0)] = None
    temperature: Annotated[Number, _limits("0 = the most likely token.", 0, 2)] = None
    top_p: Annotated[Number, _limits("Probability mass that is kept; 0 = the most likely token.", 0, 1)] = None
    top_k: Annotated[Count, _limits("Most likely tokens that are kept; 0 and -1 = all.", -1)] = None
    min_p: Annotated[Number, _limits("Least probability kept, relative to the largest.", 0, 1)] = None
    presence_penalty: Annotated[Number, _limits("Taken once from tokens generated before.", -2, 2)] = None
    frequency_penalty: Annotated[Number, _limits("Taken per occurrence of tokens generated before.", -2, 2)] = None
    repetition_penalty: Annotated[Number, _limits("Divides logits of tokens seen; 1 = off.", 0.001, 100)] = None
    logit_bias: Annotated[
        dict[str, float] | None, Meta(description="Up to 1024 token ids → values from -100 to 100, added to logits.")
    ] = None
    stop: Annotated[str | list[str] | None, Meta(description="Up to 16 texts that end the answer.")] = None
    stop_token_ids: Annotated[list[int] | None, Meta(description="Up to 1024 tokens that end the answer.")] = None
    ignore_eos: Annotated[Switch, Meta(description="The model's own end does not end the answer.")] = None
    skip_special_tokens: Annotated[Switch, Meta(description="false = special tokens appear in the text.")] = None
    seed: Annotated[Count, _limits("Same seed, same request, same answer.", -(2**63), 2**63 - 1)] = None
    response_format: Annotated[ResponseFormat | None, Meta(description="What the answer must look like.")] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Meta(description="The same in more forms; one of the two.")
    ] = None

    user: WithoutEffect = None
    metadata: WithoutEffect = None
    store: WithoutEffect = None
    service_tier: WithoutEffect = None
    safety_identifier: WithoutEffect = None
    prompt_cache_key: WithoutEffect = None
    prompt_cache_options: WithoutEffect = None
    prompt_cache_retention: WithoutEffect = None


class ChatBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(description="The conversation, oldest first.")]
    max_completion_tokens: Annotated[Count, _limits("Newer name of max_tokens.", 1)] = None
    logprobs: Annotated[Switch, Meta(description="Log probabilities of the answer's tokens.")] = None
    top_logprobs: Annotated[Count, _limits("Alternatives per token; only with logprobs.", 0, 20)] = None
    add_generation_prompt: Annotated[Switch, Meta(description="false = the template opens no answer.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Further variables for the chat template.")
    ] = None

    parallel_tool_calls: WithoutEffect = None
    prediction: WithoutEffect = None

    tools: Refused = None
    tool_choice: Refused = None
    functions: Refused = None
    function_call: Refused = None
    modalities: Refused = None
    audio: Refused = None
    moderation: Refused = None
    reasoning_effort: Refused = None
    verbosity: Refused = None
    web_search_options: Refused = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[Any, Meta(description="A text, a list of texts, a list of token ids, or a list of such lists.")]
    echo: Annotated[Switch, Meta(description="The answer begins with the prompt.")] = None
    logprobs: Annotated[Count, _limits("Alternatives per token; null = no log probabilities.", 0, 20)] = None

    suffix: Refused = None
    best_of: Refused = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /tokenize`: either `prompt` or `messages`."""

    model: Annotated[str | None, Meta(description="The served model's name.")] = None
    prompt: Annotated[str | None, Meta(description="A text.")] = None
    messages: Annotated[list[dict[str, Any]] | None, Meta(description="A conversation, for the chat template.")] = None
    add_special_tokens: Annotated[Switch, Meta(description="Of a text: with the tokens that begin it.")] = None
    add_generation_prompt: Annotated[Switch, Meta(description="false = the template opens no answer.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Further variables for the chat template.")
    ] = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /detokenize`."""

    tokens: Annotated[list[int], Meta(description="Token ids.")]
    model: Annotated[str | None, Meta(description="The served model's name.")] = None
    skip_special_tokens: Annotated[Switch, Meta(description="true = special tokens are left out.")] = None
