"""Sizes and limits of an engine.

Owns: `EngineConfig` and the check that its numbers can work together.
Does not know: where the numbers come from (the topology file, a measurement at start, a caller of `busllm.LLM`).
Next on the path: `engine/engine.py`.
"""

from __future__ import annotations

import msgspec

from busllm.errors import ConfigError

# "cpu" is the compiled pass for CPUs, which has an attention of its own
BUILT_IN_ATTENTIONS = ("auto", "torch", "cpu", "flashinfer")
COMPILED_PAGE_UNIT = 16  # the compiled pass stores the keys of so many tokens together, within a page


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine may use.

    Attributes:
        num_pages: size of the KV cache.
        page_tokens: tokens per page; a shared prefix is found in whole pages.
        step_tokens: tokens computed per step, decode rows and prefill chunks together; at least `max_running`.
        step_limit_s: seconds that a step should take: `step_tokens` is then the most that is ever tried. None = none.
        max_running: sequences with a slot.
        max_waiting: new sequences beyond the free slots that may queue.
        max_context_tokens: prompt and output together; the model's own limit holds as well.
        prefix_cache: whether computed pages are kept for later sequences.
        max_prefix_wait_steps: how long a sequence may wait for pages that a running one is just computing.
        expected_output_tokens: length of an answer that admission assumes until answers have been seen.
    """

    num_pages: int
    page_tokens: int = 16
    step_tokens: int = 256
    step_limit_s: float | None = None
    max_running: int = 64
    max_waiting: int = 1024
    max_context_tokens: int = 8192
    prefix_cache: bool = True
    max_prefix_wait_steps: int = 64
    expected_output_tokens: int = 128


def check_config(config: EngineConfig) -> None:
    """Checks that the numbers are possible.

    Raises:
        ConfigError: names the key.
    """
    for key in ("num_pages", "page_tokens", "step_tokens", "max_running", "max_context_tokens"):
        value = getattr(config, key)
        if value < 1:
            raise ConfigError(f"is {value}; it must be at least 1.", key=f"scheduler.{key}")
    for key in ("max_waiting", "max_prefix_wait_steps", "expected_output_tokens"):
        value = getattr(config, key)
        if value < 0:
            raise ConfigError(f"is {value}; it must not be negative.", key=f"scheduler.{key}")
    if config.step_tokens < config.max_running:
        raise ConfigError(too_short_step(config.step_tokens, config.max_running), key="scheduler.step_tokens")


def too_short_step(step_tokens: int, max_running: int) -> str:
    """What to say of `step_tokens` below `max_running`."""
    return (
        f"is {step_tokens}; every running sequence needs one token per step, "
        f"so it must be at least max_running ({max_running})."
    )


def cut_blocks(page_tokens: int) -> str:
    """What to say of pages that are not whole blocks of the compiled pass."""
    return f"is {page_tokens}; the compiled forward pass needs a multiple of {COMPILED_PAGE_UNIT}."
