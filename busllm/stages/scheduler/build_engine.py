"""From the topology's words to an engine: called in the engine's own thread, since it imports and loads.

Owns: what "auto" means for page and step sizes, and how much KV cache there is.
Does not know: the bus.
Next on the path: `engine/engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.free_memory import kv_bytes_of_free_memory
from busllm.engine.runner import Runner
from busllm.engine.step_budget import automatic_step_tokens
from busllm.errors import ConfigError
from busllm.grammar.compiler import GrammarCompiler
from busllm.model_store.files import ModelFiles
from busllm.stages.load_model import choose_device, model_runner, null_runner
from busllm.stages.scheduler.build_leader import Leading, leading_runner
from busllm.text.vocabulary import load_vocabulary
from busllm.topology.config import DEFAULT_KV_TOKENS, ModelConfig, SchedulerConfig
from busllm.topology.sizes import parse_memory

AUTO_PAGE_TOKENS = 16


def build_engine(
    files: ModelFiles,
    model: ModelConfig,
    scheduler: SchedulerConfig,
    *,
    device_number: int = 0,
    leading: Leading | None = None,
    progress: Callable[[str], None] | None = None,
) -> Engine:
    """Loads the model and makes its engine.

    Args:
        device_number: of the scheduler among those of its host.
        leading: of rank 0, when there are others.
        progress: told what takes long.

    Raises:
        ModelError: the model cannot be served.
        ConfigError: the sizes cannot work.
        EngineError: the ranks do not get together.
    """
    grammars = GrammarCompiler(partial(load_vocabulary, files))
    if leading is not None:
        runner = leading_runner(files, model, scheduler, leading, grammars)
    elif files.is_null:
        runner = null_runner(model, grammars)
    else:
        device = choose_device(scheduler, device_number)
        runner = model_runner(files, model, scheduler, device, grammars=grammars, progress=progress)
    page_tokens = AUTO_PAGE_TOKENS if scheduler.page_tokens == "auto" else scheduler.page_tokens
    max_context_tokens = min(
        model.max_context_tokens or runner.model.max_context_tokens, runner.model.max_context_tokens
    )
    step_tokens, step_limit_s = automatic_step_tokens(runner, scheduler.max_running)
    if scheduler.step_tokens != "auto":
        step_tokens, step_limit_s = scheduler.step_tokens, None
    config = EngineConfig(
        num_pages=1,  # not known yet
        page_tokens=page_tokens,
        step_tokens=step_tokens,
        step_limit_s=step_limit_s,
        max_running=scheduler.max_running,
        max_waiting=scheduler.max_waiting,
        max_context_tokens=max_context_tokens,
        prefix_cache=scheduler.prefix_cache == "radix",
    )
    num_sharers = 1 if leading is None else leading.num_beside
    config = msgspec.structs.replace(config, num_pages=_num_pages(scheduler, runner, config, num_sharers))
    try:
        return Engine(runner, config, grammars)
    except MemoryError as error:
        key = "scheduler.kv_tokens" if scheduler.kv_memory is None else "scheduler.kv_memory"
        raise ConfigError(f"asks for more memory than this host can give: {error}.", key=key) from error


def _num_pages(scheduler: SchedulerConfig, runner: Runner, config: EngineConfig, num_sharers: int) -> int:
    page_tokens = config.page_tokens
    if scheduler.kv_memory is None:
        return max(1, (scheduler.kv_tokens or DEFAULT_KV_TOKENS) // page_tokens)
    memory_bytes = _memory_bytes(scheduler.kv_memory, runner, config, num_sharers)
    num_pages = memory_bytes // (runner.model.kv_bytes_per_token * page_tokens or 1)
    if num_pages < 1:
        raise ConfigError(f"{scheduler.kv_memory} holds no page of {page_tokens} tokens.", key="scheduler.kv_memory")
    return num_pages


def _memory_bytes(kv_memory: str | float, runner: Runner, config: EngineConfig, num_sharers: int) -> int:
    if isinstance(kv_memory, str):
        num_bytes = parse_memory(kv_memory)
        if num_bytes is None:
            raise ConfigError(f"{kv_memory!r} is no amount of memory.", key="scheduler.kv_memory")
        return num_bytes
    if runner.depth == 0:
        return kv_bytes_of_free_memory(kv_memory, num_sharers, mapped_bytes=runner.model.mapped_bytes)
    from busllm.engine.memory_profile import kv_bytes_of_share  # imports torch

    return kv_bytes_of_share(runner, kv_memory, config)
