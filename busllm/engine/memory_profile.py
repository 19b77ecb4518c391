"""How much device memory is left for the KV cache.

Owns: the measurement of the largest step, and the arithmetic of a share.
Does not know: where the share comes from.
Next on the path: `engine/engine.py`, which is given the number of pages that follows.

What a step needs beside weights and cache (activations, the logits of all rows several times over, the kernels'
workspace) depends on the model and on the step's config. It is run once, with rows that all draw by top-p, and the peak
is read from torch's allocator.
"""

from __future__ import annotations

import numpy as np
import torch

from busllm.engine.config import EngineConfig
from busllm.engine.model_runner import ModelRunner
from busllm.engine.runner import Runner
from busllm.errors import ConfigError
from busllm.plan import PagesAssigned, PlanRow, SlotOpened, StepPlan
from busllm.sampling import SamplingParams


def kv_bytes_of_share(runner: Runner, share: float, config: EngineConfig) -> int:
    """A share of the memory that is free once the model is loaded, less what the largest step needs.

    Args:
        runner: on CUDA, not allocated yet.
        share: above 0, at most 1.
        config: all but the number of pages.

    Raises:
        ConfigError: nothing is left, or the model is split among ranks, which cannot be measured one at a time.
    """
    if not isinstance(runner, ModelRunner):
        raise ConfigError(
            "is a share, which is measured on one device. With tensor_parallel give an amount or kv_tokens.",
            key="scheduler.kv_memory",
        )
    peak_bytes = _peak_bytes(runner, config)
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    left_bytes = int(free_bytes * share) - peak_bytes
    if left_bytes < 1:
        raise ConfigError(
            f"is {share}; of {free_bytes / 2**30:.1f} GiB free that leaves nothing for the KV cache, since a step of "
            f"{config.step_tokens} tokens and {config.max_running} rows needs {peak_bytes / 2**30:.1f} GiB. "
            "Lower step_tokens or max_running, or raise it.",
            key="scheduler.kv_memory",
        )
    return left_bytes


def largest_step(config: EngineConfig) -> StepPlan:
    """A plan with as many rows and tokens as a step may have. All rows share the same pages: values do not matter.

    Args:
        config: of which sizes count; the number of pages does not.
    """
    lengths: list[int] = []
    for rows_after in reversed(range(config.max_running)):
        spare = config.step_tokens - sum(lengths) - rows_after
        lengths.append(max(1, min(spare, config.max_context_tokens - 1)))
    lengths.sort()
    params = SamplingParams(temperature=1.0, top_p=0.9)
    token_ids = [np.zeros(length, dtype="<i4").tobytes() for length in lengths]
    return StepPlan(
        number=0,
        rows=tuple(
            PlanRow(slot=slot, start=0, num_tokens=length, token_ids=token_ids[slot], from_step=None, samples=True)
            for slot, length in enumerate(lengths)
        ),
        num_decode_rows=lengths.count(1),
        opened=tuple(
            SlotOpened(slot=slot, params=params, seed=slot, token_ids=token_ids[slot], num_prompt_tokens=length)
            for slot, length in enumerate(lengths)
        ),
        pages=tuple(
            PagesAssigned(slot=slot, first=0, pages=tuple(range(-(-length // config.page_tokens))))
            for slot, length in enumerate(lengths)
        ),
    )


def _peak_bytes(runner: ModelRunner, config: EngineConfig) -> int:
    plan = largest_step(config)
    num_pages = max(len(entry.pages) for entry in plan.pages)
    eager = runner.without_recorder()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    eager.allocate(
        num_pages=num_pages,
        page_tokens=config.page_tokens,
        max_running=config.max_running,
        max_context_tokens=config.max_context_tokens,
    )
    eager.collect(eager.launch(plan))
    cache_bytes = num_pages * config.page_tokens * runner.model.kv_bytes_per_token
    peak_bytes = torch.cuda.max_memory_allocated() - before_bytes - cache_bytes
    eager.close()
    return max(0, peak_bytes)
