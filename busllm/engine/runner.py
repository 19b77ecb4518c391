"""The forward pass as a seam: what executes step plans.

Owns: the protocol `Runner` and the facts about a model that the planner needs (`ModelInfo`).
Does not know: requests, pages as a resource, the prefix cache.
Next on the path: `engine/model_runner.py` (torch) or `engine/null.py` (no model).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from busllm.plan import StepPlan, StepResult


class ModelInfo(msgspec.Struct, frozen=True):
    """Facts about a loaded model.

    Attributes:
        name: architecture, for people.
        vocab_size: number of logits.
        max_context_tokens: prompt and output together.
        eos_token_ids: tokens that end a turn.
        kv_bytes_per_token: all layers, keys and values, padding included.
        fingerprint: hex digest that differs when weights, configuration or number format differ.
        attention: the backend that computes, for people; empty when none does.
        mapped_bytes: of weights that are files in memory: the kernel calls it available, but every step reads them.
    """

    name: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    fingerprint: str
    attention: str = ""
    mapped_bytes: int = 0


class Runner(Protocol):
    """Executes plans. `launch` may return before the step is done; `collect` waits for it.

    At depth 0 (CPU) `launch` may do all the work. Plans are launched in the order of their numbers.
    """

    @property
    def model(self) -> ModelInfo:
        """The loaded model."""
        ...

    @property
    def depth(self) -> int:
        """How many steps may be in flight beyond the one being collected: 0 on CPU, 1 on CUDA."""
        ...

    def allocate(self, *, num_pages: int, page_tokens: int, max_running: int, max_context_tokens: int) -> None:
        """Makes the KV cache, page tables (max_running slots) and sampler state. Called once, before the first plan."""
        ...

    def prefault_memory(self) -> bool:
        """Uses some memory for the first time, so that no step has to, for a few milliseconds; whether more is left.

        Called while there is nothing to compute.
        """
        ...

    def launch(self, plan: StepPlan) -> int:
        """Starts a step; returns its handle."""
        ...

    def collect(self, handle: int) -> StepResult:
        """Waits for a launched step."""
        ...

    def close(self) -> None:
        """Gives back memory and threads."""
        ...
