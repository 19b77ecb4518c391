"""A part of a stored tensor: what one of several ranks reads.

Owns: `TensorPart`.
Does not know: which part belongs to whom (`engine/parallel/shard.py`).
Next on the path: `weights.py`.
"""

from __future__ import annotations

from typing import NamedTuple


class TensorPart(NamedTuple):
    """Rows and columns of a tensor, without steps.

    Attributes:
        rows: of the first dimension.
        columns: of the last dimension of a matrix; a vector has none.
    """

    rows: slice = slice(None)
    columns: slice = slice(None)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the part of a tensor of this shape has."""
        sizes = [len(range(*self.rows.indices(shape[0]))), *shape[1:]]
        if len(shape) > 1:
            sizes[-1] = len(range(*self.columns.indices(shape[-1])))
        return tuple(sizes)


WHOLE = TensorPart()
