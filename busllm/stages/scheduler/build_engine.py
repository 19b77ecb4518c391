"""From the topology's words to an engine: called in the engine's own thread, since it imports and loads.

Owns: what "auto" means for page and step sizes, and how much KV cache there is.
Does not know: the bus.
Next on the path: `engine/engine.py`.
"""

from __future__ import annotations

from functools import partial

import msgspec

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.free_memory import free_memory_bytes
from busllm.engine.openmp import calm_openmp
from busllm.engine.runner import Runner
from busllm.errors import ConfigError
from busllm.grammar.compiler import GrammarCompiler
from busllm.model_store.files import ModelFiles
from busllm.text.vocabulary import load_vocabulary
from busllm.topology.config import DEFAULT_KV_TOKENS, ModelConfig, SchedulerConfig
from busllm.topology.sizes import parse_memory

AUTO_PAGE_TOKENS = 16
AUTO_STEP_TOKENS = 256
AUTO_STEP_TOKENS_ON_GPU = 2048


def build_engine(files: ModelFiles, model: ModelConfig, scheduler: SchedulerConfig) -> Engine:
    """Loads the model and makes its engine.

    Raises:
        ModelError: the model cannot be served.
        ConfigError: the sizes cannot work.
    """
    grammars = GrammarCompiler(partial(load_vocabulary, files))
    runner = _null_runner(model, grammars) if files.is_null else _model_runner(files, model, scheduler, grammars)
    page_tokens = AUTO_PAGE_TOKENS if scheduler.page_tokens == "auto" else scheduler.page_tokens
    max_context_tokens = min(
        model.max_context_tokens or runner.model.max_context_tokens, runner.model.max_context_tokens
    )
    if scheduler.step_tokens == "auto":
        auto = AUTO_STEP_TOKENS if runner.depth == 0 else AUTO_STEP_TOKENS_ON_GPU
        step_tokens = max(auto, scheduler.max_running)
    else:
        step_tokens = scheduler.step_tokens
    config = EngineConfig(
        num_pages=1,  # not known yet
        page_tokens=page_tokens,
        step_tokens=step_tokens,
        max_running=scheduler.max_running,
        max_waiting=scheduler.max_waiting,
        max_context_tokens=max_context_tokens,
        prefix_cache=scheduler.prefix_cache == "radix",
    )
    config = msgspec.structs.replace(config, num_pages=_num_pages(scheduler, runner, config))
    return Engine(runner, config, grammars)


def _num_pages(scheduler: SchedulerConfig, runner: Runner, config: EngineConfig) -> int:
    page_tokens = config.page_tokens
    if scheduler.kv_memory is None:
        return max(1, (scheduler.kv_tokens or DEFAULT_KV_TOKENS) // page_tokens)
    memory_bytes = _memory_bytes(scheduler.kv_memory, runner, config)
    num_pages = memory_bytes // (runner.model.kv_bytes_per_token * page_tokens or 1)
    if num_pages < 1:
        raise ConfigError(f"{scheduler.kv_memory} holds no page of {page_tokens} tokens.", key="scheduler.kv_memory")
    return num_pages


def _memory_bytes(kv_memory: str | float, runner: Runner, config: EngineConfig) -> int:
    if isinstance(kv_memory, str):
        num_bytes = parse_memory(kv_memory)
        if num_bytes is None:
            raise ConfigError(f"{kv_memory!r} is no amount of memory.", key="scheduler.kv_memory")
        return num_bytes
    if runner.depth == 0:
        return int(free_memory_bytes() * kv_memory)
    from busllm.engine.memory_profile import kv_bytes_of_share  # imports torch

    return kv_bytes_of_share(runner, kv_memory, config)


def _null_runner(model: ModelConfig, grammars: GrammarCompiler) -> Runner:
    from busllm.engine.null import NullRunner
    from busllm.topology.config import NullConfig

    null = model.null or NullConfig()
    return NullRunner(
        step_time_s=null.step_time_s, load_time_s=null.load_time_s, eos_one_in=null.eos_one_in, grammars=grammars
    )


def _model_runner(
    files: ModelFiles, model: ModelConfig, scheduler: SchedulerConfig, grammars: GrammarCompiler
) -> Runner:
    calm_openmp()
    from busllm.engine.loader import LoadConfig, load_runner  # imports torch

    if model.quantization in ("int8", "int4"):
        raise ConfigError(
            f"{model.quantization!r} is not available with the {scheduler.attention!r} forward pass; use 'auto'.",
            key="model.quantization",
        )
    config = LoadConfig(device=scheduler.device, dtype=model.dtype, attention=scheduler.attention)
    return load_runner(files, config, grammars=grammars)
