"""Token embedding.

Owns: the table of one row per token id.
Does not know: whether the head shares it (the builder gives the head its own packed copy).
Next on the path: `engine/models/decoder.py`.
"""

from __future__ import annotations

import torch
from torch.nn import functional


class Embedding:
    """Looks rows up."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) of ids → (num_tokens, hidden_size)."""
        return functional.embedding(token_ids, self._weight)
