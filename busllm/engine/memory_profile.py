"""How much device memory is left for the KV cache.

Owns: the measurement of the largest step, and the arithmetic of a share.
Does not know: where the share comes from.
Next on the path: `engine/engine.py`, which is given the number of pages that follows.

What a step needs beside weights and cache (activations, the logits of all rows several times over, the kernels'
workspace) depends on the model and on the step's config, and so do recordings and the buffers of attention's wrappers.
So everything is made and the largest step run once, with a cache of one page. What stays is read from the driver, since
libraries allocate beside torch; what comes and goes is the peak of torch's allocator.
"""

from __future__ import annotations

import numpy as np
import torch

from busllm.engine.config import EngineConfig
from busllm.engine.model_runner import ModelRunner
from busllm.engine.runner import Runner
from busllm.errors import ConfigError
from busllm.plan import PagesAssigned, PlanRow, SlotOpened, StepPlan
from busllm.sampling import MAX_LOGPROBS, SamplingParams

UNMEASURED_BYTES = 256 * 2**20  # gaps between torch's blocks, workspaces of products of other sizes

_EVERYTHING = SamplingParams(
    temperature=1.0,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logprobs=MAX_LOGPROBS,
    prompt_logprobs=MAX_LOGPROBS,
)


def kv_bytes_of_share(runner: Runner, share: float, config: EngineConfig) -> int:
    """A share of the memory that is free once the model is loaded, less what everything but the cache needs.

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
    needed_bytes = _measure(runner, config)
    free_bytes, _ = torch.cuda.mem_get_info()
    return left_bytes(free_bytes, share, needed_bytes, config)


def left_bytes(free_bytes: int, share: float, needed_bytes: int, config: EngineConfig) -> int:
    """What the cache gets: of a share of 1 too, no more than leaves room for everything else.

    Args:
        free_bytes: on the device, with the weights on it.
        share: above 0, at most 1.
        needed_bytes: of all but the cache.
        config: for the message.

    Raises:
        ConfigError: nothing is left.
    """
    left = int(free_bytes * share) - needed_bytes - UNMEASURED_BYTES
    if left < 1:
        needed = (needed_bytes + UNMEASURED_BYTES) / 2**30
        raise ConfigError(
            f"is {share}; of {free_bytes / 2**30:.1f} GiB free that leaves nothing for the KV cache, since steps of "
            f"{config.step_tokens} tokens and {config.max_running} rows need {needed:.1f} GiB. "
            "Lower step_tokens or max_running, or raise it.",
            key="scheduler.kv_memory",
        )
    return left


def largest_step(config: EngineConfig) -> StepPlan:
    """A plan with as many rows and tokens as a step may have, and every setting that takes memory.

    All rows share one page, also the one that stands at the end of its context: values do not matter.

    Args:
        config: of which sizes count; the number of pages does not.
    """
    lengths: list[int] = []
    for rows_after in reversed(range(config.max_running)):
        spare = config.step_tokens - sum(lengths) - rows_after
        lengths.append(max(1, min(spare, config.max_context_tokens - 1)))
    lengths.sort()
    # Penalties look at all tokens of the longest sequence, for every row.
    starts = [0] * (len(lengths) - 1) + [config.max_context_tokens - 1 - lengths[-1]]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    tokens = [np.zeros(end, dtype="<i4").tobytes() for end in ends]
    return StepPlan(
        number=0,
        rows=tuple(
            PlanRow(
                slot=slot, start=start, num_tokens=length, token_ids=bytes(4 * length), from_step=None, samples=True
            )
            for slot, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ),
        num_decode_rows=lengths.count(1),
        opened=tuple(
            SlotOpened(slot=slot, params=_EVERYTHING, seed=slot, token_ids=tokens[slot], num_prompt_tokens=end)
            for slot, end in enumerate(ends)
        ),
        pages=tuple(
            PagesAssigned(slot=slot, first=0, pages=(0,) * -(-end // config.page_tokens))
            for slot, end in enumerate(ends)
        ),
        prompt_logprob_rows=(len(lengths) - 1,),
    )


def _measure(runner: ModelRunner, config: EngineConfig) -> int:
    """Bytes of all but weights and cache: recordings and buffers, and the largest step's peak above them."""
    plan = largest_step(config)
    measured = runner.unallocated_twin()
    before_bytes = _free_bytes()
    measured.allocate(
        num_pages=1,
        page_tokens=config.page_tokens,
        max_running=config.max_running,
        max_context_tokens=config.max_context_tokens,
    )
    kept_bytes = before_bytes - _free_bytes()
    torch.cuda.reset_peak_memory_stats()
    reserved_bytes = torch.cuda.memory_reserved()
    measured.collect(measured.launch(plan))
    peak_bytes = torch.cuda.max_memory_reserved() - reserved_bytes
    measured.close()
    _free_bytes()
    return max(0, kept_bytes) + peak_bytes


def _free_bytes() -> int:
    """On the device, once torch has given back what it does not use."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
