"""Keeps rows apart in code that is not ours: on a CPU each row of a product has the same bits in every batch.

Owns: the exchange of torch's products, and of its SiLU, for ones whose rows do not depend on each other, while a
model of `transformers` runs.
Does not know: models; it sees the functions that they call.
Next on the path: `engine/layers/linear.py`, which tells why torch's own products will not do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from busllm.engine.layers.feed_forward import silu
from busllm.engine.layers.linear import can_pack, onednn_product

Substitute = Callable[..., torch.Tensor | None]  # None = call what was called


class RowProducts(TorchFunctionMode):
    """A context in which products, of the dtypes that oneDNN has here, and SiLU give each row the same bits."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the substitute where there is one for these arguments, else what was called."""
        kwargs = kwargs or {}
        substitute = _SUBSTITUTES.get(func)
        if substitute is None:
            return func(*args, **kwargs)
        # In its own torch functions the mode is off.
        result = substitute(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def _product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """states · weightᵀ + bias, (…, in_features) → (…, out_features)."""
    if not can_pack(states.dtype) or weight.dim() != 2 or not states.numel():
        return None
    flat = onednn_product(states.reshape(-1, states.shape[-1]), weight, bias)
    return flat.reshape(*states.shape[:-1], weight.shape[0])


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    return _product(input, weight, bias)


def _matmul(input: torch.Tensor, other: torch.Tensor, **options: Any) -> torch.Tensor | None:
    return None if options or other.dim() != 2 or input.dim() < 2 else _product(input, other.t())


def _addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, **options: Any) -> torch.Tensor | None:
    return None if options or input.dim() != 1 else _product(mat1, mat2.t(), input)


def _grouped(input: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor, **options: Any) -> torch.Tensor | None:
    """Experts: rows offs[e - 1] : offs[e] of input (num_rows, in) times weight[e] of (num_experts, in, out)."""
    if any(value is not None for value in options.values()) or not can_pack(input.dtype) or input.dim() != 2:
        return None
    out, first = input.new_zeros(input.shape[0], weight.shape[-1]), 0
    for expert, end in enumerate(offs.tolist()):
        if end > first:
            out[first:end] = onednn_product(input[first:end], weight[expert].t(), None)
        first = end
    return out


def _silu(input: torch.Tensor, inplace: bool = False) -> torch.Tensor | None:
    return None if inplace else silu(input)


_SUBSTITUTES: Mapping[Any, Substitute] = MappingProxyType(
    {
        functional.linear: _linear,
        torch.matmul: _matmul,
        torch.Tensor.matmul: _matmul,
        torch.Tensor.__matmul__: _matmul,
        torch.mm: _matmul,
        torch.addmm: _addmm,
        torch._grouped_mm: _grouped,
        functional.grouped_mm: _grouped,
        functional.silu: _silu,
    }
)
