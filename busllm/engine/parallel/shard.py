"""Which part of a model a rank has.

Owns: the split of dimensions, heads and vocabulary among ranks, as a pure function of rank and number of ranks.
Does not know: tensors, files, who the other ranks are.
Next on the path: `engine/models/build.py`, which reads these parts of the weights.

The split is Megatron's (arXiv:1909.08053): queries, keys, values, gate and up by output rows, so that each rank has
whole heads; the output projection and down by input columns, so that the ranks' products add up; embedding and head by
rows of the vocabulary.
"""

from __future__ import annotations

import msgspec

from busllm.errors import ModelError


class Shard(msgspec.Struct, frozen=True):
    """One rank's part.

    Attributes:
        rank: 0 … num_ranks - 1.
        num_ranks: among how many the model is split.
    """

    rank: int = 0
    num_ranks: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides and samples."""
        return self.rank == 0

    def span(self, size: int) -> slice:
        """This rank's part of a dimension. The parts follow each other and differ by at most one."""
        return slice(size * self.rank // self.num_ranks, size * (self.rank + 1) // self.num_ranks)

    def widest(self, size: int) -> int:
        """The size of the largest part of a dimension."""
        return -(-size // self.num_ranks)

    def heads(self, num_heads: int) -> slice:
        """The query heads of this rank.

        Raises:
            ModelError: they cannot be shared out evenly.
        """
        if num_heads % self.num_ranks:
            raise ModelError(f"{num_heads} attention heads cannot be shared out evenly to {self.num_ranks} ranks.")
        return self.span(num_heads)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """The key-value heads that this rank's query heads read; with fewer heads than ranks several ranks have one.

        Raises:
            ModelError: they can neither be shared out nor repeated evenly.
        """
        if num_kv_heads % self.num_ranks == 0:
            return self.span(num_kv_heads)
        if self.num_ranks % num_kv_heads:
            raise ModelError(
                f"{num_kv_heads} key-value heads can neither be split nor repeated evenly among {self.num_ranks} ranks."
            )
        head = self.rank * num_kv_heads // self.num_ranks
        return slice(head, head + 1)


def rows_of(heads: slice, head_dim: int) -> slice:
    """The rows of a projection that make these heads."""
    return slice(heads.start * head_dim, heads.stop * head_dim)


def size_of(part: slice) -> int:
    """How many a part has."""
    size: int = part.stop - part.start
    return size
