"""Root mean square normalisation (arXiv:1910.07467).

Owns: one weight vector and its epsilon.
Does not know: which layer it stands in; the last dimension is the one that is normalised (hidden state or one head).
Next on the path: `engine/models/decoder.py`.
"""

from __future__ import annotations

import torch
from torch.nn import functional


class RmsNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, squares summed in float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Normalises (…, size); keeps shape and dtype."""
        return functional.rms_norm(states, self._weight.shape, self._weight, self._eps)
