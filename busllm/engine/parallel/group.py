"""What the ranks of one replica do together.

Owns: the protocol `Group`, and the group of one rank, in which everything is already done.
Does not know: how tensors travel (`torch_group.py`), what is computed.
Next on the path: `layers.py`, whose layers add up and gather.

All ranks make the same calls in the same order: each call is one collective operation.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from busllm.engine.parallel.shard import Shard

if TYPE_CHECKING:
    import torch  # the null model's ranks do without it

COLLECTIVE_TIMEOUT_S = 5.0  # who does not come along within this time is taken for dead
_WATCH_GRACE_S = 1.0  # the library's own time limit comes first


class Group(Protocol):
    """The ranks of a replica, seen from one of them.

    Every method raises `EngineError` when another rank is gone or does not come along in time.
    """

    @property
    def shard(self) -> Shard:
        """Which rank this is."""
        ...

    @property
    def waits_since_s(self) -> float | None:
        """Since when (monotonic) a collective operation of a step is not done; None = all are.

        Asked by another thread than the one that computes.
        """
        ...

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Adds up the ranks' tensors of one shape; every rank gets the same sum, in the dtype of the parts."""
        ...

    def gather(self, part: torch.Tensor) -> list[torch.Tensor] | None:
        """Collects the ranks' tensors of one shape at the first rank, in the order of ranks; None at the others."""
        ...

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        """Gives every rank the values of the first; at the others `values` is overwritten."""
        ...

    def enter(self, number: int) -> None:
        """The door to a step. The first rank opens it when all have the plan; the others wait there, however long.

        Args:
            number: of the step; all ranks must name the same one.
        """
        ...

    def close(self) -> None:
        """Leaves the group."""
        ...


class Alone:
    """The group of a model that is not split."""

    def __init__(self, shard: Shard | None = None) -> None:
        """A shard other than the only one is for ranks that compute nothing together (the null model)."""
        self._shard = shard or Shard()

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def waits_since_s(self) -> float | None:
        return None

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> list[torch.Tensor] | None:
        return [part]

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def enter(self, number: int) -> None:
        return

    def close(self) -> None:
        return


def hangs_for_s(group: Group) -> float | None:
    """How long a group has been in one operation, when that is too long; asked by another thread than the one in it."""
    since_s = group.waits_since_s
    if since_s is None:
        return None
    lasted_s = time.monotonic() - since_s
    return lasted_s if lasted_s > COLLECTIVE_TIMEOUT_S + _WATCH_GRACE_S else None
