"""Sampling parameters: what a request may ask of the sampler, and the ranges that are allowed.

Owns: the one `SamplingParams` used by the HTTP frontend, the messages, the engine and `busllm.LLM`, with the `Grammar`
that an answer may have to follow; its range checks; the seed of each choice.
Does not know: HTTP field names of any particular endpoint, tensors (the definition is computed in `engine/sampler.py`).
"""

from __future__ import annotations

import enum
import json
import math
import numbers
import re

import msgspec

from busllm.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_SEED = 2**63 - 1
_NUMBERS = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs"),
)
_MASK = 2**64 - 1


class GrammarKind(enum.Enum):
    """How the text of a grammar is to be read."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an answer must look like; compiled by `busllm/grammar/`.

    Attributes:
        kind: the notation, or its name ("regex").
        text: a JSON schema; a regular expression that the whole answer matches; a JSON list of the texts that are
            allowed; or a context-free grammar in the notation of Lark. What is JSON may be given as dict or list.
        param: name of the request's field that it came in, for errors.
    """

    kind: GrammarKind
    text: str
    param: str = "grammar"

    def __post_init__(self) -> None:
        """Takes the forms that people write. What is none of them stays, and `check_sampling` refuses it."""
        if isinstance(self.kind, str) and self.kind in {kind.value for kind in GrammarKind}:
            msgspec.structs.force_setattr(self, "kind", GrammarKind(self.kind))
        if isinstance(self.text, (dict, list)) and self.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE):
            msgspec.structs.force_setattr(self, "text", json.dumps(self.text))


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Settings of one request. Fields are only appended, with defaults (it travels on the bus).

    Attributes:
        temperature: 0 = greedy.
        top_p: smallest set of most likely tokens whose probability reaches it; 0 = the most likely token.
        top_k: number of most likely tokens kept; None, 0 and -1 = all.
        min_p: tokens below `min_p` times the largest probability are dropped.
        max_tokens: limit of generated tokens; None = what the context leaves.
        min_tokens: end-of-turn and stop tokens are impossible before that many generated tokens.
        stop: strings that end the text; not part of it.
        stop_token_ids: tokens that end the sequence, up to 1,024; not part of the text.
        ignore_eos: the model's end-of-turn tokens do not end the sequence.
        seed: None = the frontend draws one.
        presence_penalty: subtracted once from the logit of each token generated so far.
        frequency_penalty: subtracted per occurrence from the logit of each token generated so far.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and output (CTRL,
            arXiv:1909.05858).
        logit_bias: (token id, value) pairs added to the logits, up to 1,024.
        logprobs: None = none; k = the chosen token's log probability and the k most likely (before any filter).
        prompt_logprobs: the same for each token of the prompt.
        skip_special_tokens: special tokens do not appear in the text.
        grammar: what the answer must look like; None = anything. It goes before all other settings: an answer that is
            complete ends, even before `min_tokens` and with `ignore_eos`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Takes the forms that people write: one stop string as it is, lists, a mapping of biases, -1 for all, numpy's
        numbers."""
        for field in _NUMBERS:
            value = getattr(self, field)
            if value is not None and type(value) not in (int, float, bool):
                msgspec.structs.force_setattr(self, field, _plain(value))
        if self.top_k in (0, -1):
            msgspec.structs.force_setattr(self, "top_k", None)
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for field in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, field), list):
                msgspec.structs.force_setattr(self, field, tuple(getattr(self, field)))
        if isinstance(self.logit_bias, dict):
            msgspec.structs.force_setattr(self, "logit_bias", tuple(self.logit_bias.items()))
        if any(type(number) not in (int, float) for pair in self.logit_bias if type(pair) is tuple for number in pair):
            biases = tuple(tuple(_plain(number) for number in pair) for pair in self.logit_bias)
            msgspec.structs.force_setattr(self, "logit_bias", biases)
        if isinstance(self.stop_token_ids, tuple) and any(type(number) is not int for number in self.stop_token_ids):
            msgspec.structs.force_setattr(self, "stop_token_ids", tuple(map(_plain, self.stop_token_ids)))


def _plain(value: object) -> object:
    """The same number as Python's own; anything else stays as it is, for `check_sampling` to refuse."""
    match value:
        case bool():
            return value
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
        case _:
            return value


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be between {low:g} and {high:g}.", param=name)


def _check_count(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}.", param=name)


def _check_length(name: str, length: int, most: int) -> None:
    """Every entry costs every step a little, of all who run beside it."""
    if length > most:
        raise InvalidRequest(f"{name} has {length} entries; at most {most} are allowed.", param=name)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Checks every range.

    Args:
        vocab_size: number of logits of the model (not of its tokenizer, which may be smaller).

    Raises:
        InvalidRequest: names the first field that is out of range.
    """
    try:
        msgspec.convert(msgspec.to_builtins(params, enc_hook=repr), SamplingParams)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error
    _check_number("temperature", params.temperature, 0.0, 2.0)
    _check_number("top_p", params.top_p, 0.0, 1.0)
    _check_number("min_p", params.min_p, 0.0, 1.0)
    _check_number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check_number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _check_number("repetition_penalty", params.repetition_penalty, 1e-3, 100.0)
    _check_count("top_k", params.top_k, 1, 2**31 - 1)
    _check_count("max_tokens", params.max_tokens, 0, 2**31 - 1)
    _check_count("min_tokens", params.min_tokens, 0, 2**31 - 1)
    _check_count("seed", params.seed, -MAX_SEED - 1, MAX_SEED)
    _check_count("logprobs", params.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
    _check_count("prompt_logprobs", params.prompt_logprobs, 0, min(MAX_LOGPROBS, vocab_size))
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}; it must not be over max_tokens ({params.max_tokens}).",
            param="min_tokens",
        )
    if any(not text for text in params.stop):
        raise InvalidRequest("stop has an empty string, which would match everywhere; leave it out.", param="stop")
    _check_length("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS)
    _check_length("logit_bias", len(params.logit_bias), MAX_LOGIT_BIASES)
    for token_id in params.stop_token_ids:
        _check_token_id("stop_token_ids", token_id, vocab_size)
    for token_id, value in params.logit_bias:
        _check_token_id("logit_bias", token_id, vocab_size)
        _check_number("logit_bias", value, -100.0, 100.0)


def _wrong_type(words: str) -> InvalidRequest:
    """The decoder counts fields; people name them. `words`: "Expected `str`, got `array` - at `$[17][1]`"."""
    what, _, place = words.partition(" - at `$")
    numbers = [int(number) for number in re.findall(r"\[(\d+)\]", place)]
    if not numbers:
        return InvalidRequest(f"The sampling parameters have a wrong type: {words}.")
    name = SamplingParams.__struct_fields__[numbers[0]]
    inside = "".join(f"[{number}]" for number in numbers[1:])
    if name == "grammar" and numbers[1:]:
        inside = f".{Grammar.__struct_fields__[numbers[1]]}"
    return InvalidRequest(f"{name}{inside} has a wrong type: {what}.", param=name)


def _check_token_id(name: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(f"{name} has the token id {token_id}; this model has 0 to {vocab_size - 1}.", param=name)


def mix64(value: int) -> int:
    """Mixes 64 bits (the finaliser of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def choice_seed(seed: int, choice: int) -> int:
    """Seed of one choice of a request, an unsigned 64-bit number; choice 0 keeps the request's own seed."""
    seed &= _MASK
    return seed if choice == 0 else mix64(seed ^ mix64(choice))
