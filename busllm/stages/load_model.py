"""From the topology's words to a runner: what a scheduler and a rank behind the first load alike.

Owns: which settings the loading of a model gets, and the device that "auto" means on a host with several.
Does not know: engines, ranks' ways to each other. Called in the thread that will compute, since it imports and loads.
Next on the path: `engine/loader.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from busllm.engine.openmp import calm_openmp
from busllm.engine.parallel.group import Group
from busllm.engine.runner import Runner
from busllm.grammar.compiler import GrammarCompiler
from busllm.model_store.description import NULL_MAX_CONTEXT_TOKENS
from busllm.model_store.files import ModelFiles
from busllm.topology.config import ModelConfig, NullConfig, SchedulerConfig


def null_runner(model: ModelConfig, grammars: GrammarCompiler | None = None) -> Runner:
    """The runner without a model."""
    from busllm.engine.null import NullRunner

    null = model.null or NullConfig()
    return NullRunner(
        max_context_tokens=NULL_MAX_CONTEXT_TOKENS,
        step_time_s=null.step_time_s,
        load_time_s=null.load_time_s,
        eos_one_in=null.eos_one_in,
        grammars=grammars,
    )


def model_runner(
    files: ModelFiles,
    model: ModelConfig,
    scheduler: SchedulerConfig,
    device: str,
    *,
    group: Group | None = None,
    grammars: GrammarCompiler | None = None,
    progress: Callable[[str], None] | None = None,
) -> Runner:
    """Loads the model, or a rank's part of it.

    Args:
        device: from `choose_device`.
        group: the ranks that the model is split among; None = it is not.
        grammars: of the model; None = it will not sample.
        progress: told what takes long.

    Raises:
        ModelError: it cannot be served.
        ConfigError: the settings cannot work.
    """
    from busllm.engine.loader import LoadConfig, load_runner  # imports torch

    config = LoadConfig(
        device=device,
        dtype=model.dtype,
        attention=scheduler.attention,
        quantization=model.quantization,
        page_tokens=None if scheduler.page_tokens == "auto" else scheduler.page_tokens,
        binds_threads=group is None,
    )
    return load_runner(files, config, group, grammars, progress)


def choose_device(scheduler: SchedulerConfig, number: int) -> str:
    """The device of one of several ranks and replicas on a host, and makes it the current one of this thread.

    Args:
        number: of the rank among those of its host; they take CUDA devices in turn.
    """
    calm_openmp()
    import torch

    if scheduler.device == "auto" and not torch.cuda.is_available():
        return "cpu"
    if scheduler.device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{number % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
        return device
    return scheduler.device
