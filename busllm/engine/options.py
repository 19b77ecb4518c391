"""What a user may choose about an engine in this process, and what "auto" stands for.

Owns: names (those of the topology file), defaults and checks.
Does not know: models' files, prompts.
Next on the path: `engine/loader.py` and `engine/engine.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from busllm.engine.config import EngineConfig
from busllm.engine.runner import Runner
from busllm.engine.step_budget import automatic_step_tokens
from busllm.errors import ConfigError

Tokens = Annotated[int, Meta(ge=1)]
_MAX_WAITING = 2**31 - 1  # nobody is turned away: the caller has all the prompts in memory already


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `busllm.LLM`.

    Attributes:
        device: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1", …
        dtype: of weights, numbers and cache in the torch modules: "float32", "bfloat16" or "float16"; "auto" = bfloat16
            on CUDA, and on a CPU the compiled pass (the file's own weights, sums in float32, a cache in bfloat16) where
            it serves the model, else float32.
        attention: "auto" (FlashInfer on CUDA, on a CPU the compiled pass for weights that it keeps as they are stored,
            else torch), "torch", "cpu" (the compiled pass), "flashinfer" or an installed plug-in.
        quantization: of the weights: "auto" (the file's own), "none" (bfloat16 in the compiled pass), "int8" or "int4".
        kv_tokens: size of the KV cache; rounded up to whole pages.
        page_tokens: tokens per page.
        step_tokens: most tokens computed in one step; "auto" = on CPU as many as take 0.1 s (more where many
            sequences decode), on CUDA 2048.
        max_running: sequences computed at the same time; half of what the server takes by default, since a call waits
            for its slowest prompt.
        max_context_tokens: prompt and output together; None = what the model can.
        prefix_cache: whether prompts that begin alike share their pages, also from call to call.
    """

    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    kv_tokens: Tokens = 65536
    page_tokens: Tokens | Literal["auto"] = "auto"
    step_tokens: Tokens | Literal["auto"] = "auto"
    max_running: Annotated[int, Meta(ge=1)] = 64
    max_context_tokens: Annotated[int, Meta(ge=2)] | None = None
    prefix_cache: Literal["radix", "none"] = "radix"


def read_options(options: Mapping[str, Any]) -> EngineOptions:
    """Checks names and types.

    Raises:
        ConfigError: names the option, and the nearest right one.
    """
    for key in options:
        if key not in EngineOptions.__struct_fields__:
            near = difflib.get_close_matches(key, EngineOptions.__struct_fields__, n=1)
            raise ConfigError("there is no such option.", key=key, suggestion=near[0] if near else None)
    try:
        return msgspec.convert(dict(options), EngineOptions)
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error), options) from error


def _wrong_value(words: str, options: Mapping[str, Any]) -> ConfigError:
    """`words`: "Expected `int`, got `str` - at `$.kv_tokens`"."""
    what, _, key = words.partition(" - at `$.")
    key = key.rstrip("`")
    allowed = [value for literal in _literals(get_type_hints(EngineOptions).get(key)) for value in get_args(literal)]
    near = difflib.get_close_matches(str(options.get(key)), allowed, n=1)
    others = f" Allowed by name: {', '.join(allowed)}." if allowed else ""
    return ConfigError(f"is {options.get(key)!r}. {what}.{others}", key=key, suggestion=near[0] if near else None)


def _literals(hint: Any) -> list[Any]:
    """The `Literal`s of a type or union."""
    return [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]


def engine_config(options: EngineOptions, runner: Runner) -> EngineConfig:
    """Turns options into the sizes of an engine, with what "auto" means for this runner."""
    page_tokens = 16 if options.page_tokens == "auto" else options.page_tokens
    step_tokens, step_limit_s = automatic_step_tokens(runner, options.max_running)
    if options.step_tokens != "auto":
        step_tokens, step_limit_s = options.step_tokens, None
    return EngineConfig(
        num_pages=-(-options.kv_tokens // page_tokens),
        page_tokens=page_tokens,
        step_tokens=step_tokens,
        step_limit_s=step_limit_s,
        max_running=options.max_running,
        max_waiting=_MAX_WAITING,
        max_context_tokens=options.max_context_tokens or runner.model.max_context_tokens,
        prefix_cache=options.prefix_cache == "radix",
    )
