"""Linear layers whose rows do not depend on the other rows of the batch.

Owns: the two ways to multiply by a weight matrix, and the choice between them.
Does not know: which layer it is, tensor parallelism.
Next on the path: `engine/models/decoder.py`.

A matrix library picks its kernel by the number of rows, and two kernels add in different orders. So the same token
could get other bits alone than in a batch, and a seeded answer could change with its neighbours. oneDNN with a weight
packed once, and never fewer than two rows, gives each row the same bits at every batch size (measured in float32 and
bfloat16), and reads weights faster than `torch.nn.functional.linear`, which in float32 does not.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

MIN_ROWS = 2  # one row alone takes another kernel


class Linear(Protocol):
    """y = x · weightᵀ + bias."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(num_rows, in_features) → (num_rows, out_features), same dtype."""
        ...


class PlainLinear:
    """Torch's own matrix product: CUDA, and number formats that oneDNN cannot pack."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(num_rows, in_features) → (num_rows, out_features)."""
        return functional.linear(states, self._weight, self._bias)


class OneDnnLinear:
    """oneDNN on CPU, with the weight in the blocked layout that it likes best."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(num_rows, in_features) → (num_rows, out_features)."""
        return onednn_product(states, self._packed, self._bias)


def onednn_product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """states · weightᵀ + bias by oneDNN, (num_rows, in_features) → (num_rows, out_features).

    Args:
        states: at least one row.
        weight: (out_features, in_features), packed by oneDNN or as it is.
        bias: (out_features,) or None.
    """
    num_rows = states.shape[0]
    if num_rows < MIN_ROWS:
        states = states.expand(MIN_ROWS, -1)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states.contiguous(), weight, bias, "none", [], "")
    return out[:num_rows]


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Chooses by device, dtype and what this CPU can do.

    Args:
        weight: (out_features, in_features).
        bias: (out_features,) or None.
    """
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        return OneDnnLinear(weight, bias)
    return PlainLinear(weight, bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies numbers of this dtype on this CPU."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
