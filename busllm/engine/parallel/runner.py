"""The runner of a model that is split: what rank 0's engine drives.

Owns: the order of a step over several ranks: all have the plan, the door opens, rank 0 computes its own part.
Does not know: how a plan reaches the others (`OtherRanks` is the bus's side, in `stages/scheduler/`), pages, requests.
Next on the path: `worker.py`, which does the same steps on the other ranks.
"""

from __future__ import annotations

from typing import Protocol

from busllm.engine.parallel.group import Group
from busllm.engine.runner import ModelInfo, Runner
from busllm.plan import StepPlan, StepResult


class OtherRanks(Protocol):
    """The other ranks of the replica. Both methods return when every one of them has the order, in that sequence.

    Both raise `EngineError` when one of them is gone.
    """

    def allocate(self, *, num_pages: int, page_tokens: int, max_running: int, max_context_tokens: int) -> None:
        """Has them make their part of the KV cache."""
        ...

    def plan(self, plan: StepPlan) -> None:
        """Gives them a step. They enter it when the group's door opens."""
        ...


class ParallelRunner:
    """Implements `Runner` with the other ranks' help.

    Args:
        own: rank 0's part of the model.
        others: the other ranks.
        group: all of them; connected.
        keeps: what has to live as long as the group does (the store where they met).
    """

    def __init__(self, own: Runner, others: OtherRanks, group: Group, keeps: object = None) -> None:
        self._keeps = keeps
        self._own = own
        self._others = others
        self._group = group

    @property
    def model(self) -> ModelInfo:
        """The loaded model; bytes are of this rank's part."""
        return self._own.model

    @property
    def depth(self) -> int:
        """As rank 0's own."""
        return self._own.depth

    def allocate(self, *, num_pages: int, page_tokens: int, max_running: int, max_context_tokens: int) -> None:
        """Makes the KV cache of all ranks; returns when every rank has its own."""
        sizes = {
            "num_pages": num_pages,
            "page_tokens": page_tokens,
            "max_running": max_running,
            "max_context_tokens": max_context_tokens,
        }
        self._others.allocate(**sizes)
        self._own.allocate(**sizes)
        self._group.enter(0)

    def prefault_memory(self) -> bool:
        """Nothing: a step waits for every rank, and the others hear of steps only."""
        return False

    def launch(self, plan: StepPlan) -> int:
        """Starts a step on all ranks, here last.

        Raises:
            EngineError: a rank is gone, or the plan contradicts what the slots hold.
        """
        self._others.plan(plan)
        self._group.enter(plan.number)
        return self._own.launch(plan)

    def collect(self, handle: int) -> StepResult:
        """Waits for a launched step."""
        return self._own.collect(handle)

    def close(self) -> None:
        """Leaves the group."""
        self._own.close()
        self._group.close()
