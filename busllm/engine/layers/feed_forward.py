"""The feed-forward half of a decoder layer.

Owns: the protocol `FeedForward` and its dense implementation, the gated unit with SiLU (SwiGLU, arXiv:2002.05202).
Does not know: attention, norms. A mixture of experts is another implementation of the same protocol.
Next on the path: `engine/models/decoder.py`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from busllm.engine.layers.linear import Linear


class FeedForward(Protocol):
    """Maps each token's hidden state on its own."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) → (num_tokens, hidden_size)."""
        ...


class GatedFeedForward:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: Linear, up: Linear, down: Linear) -> None:
        self._gate = gate
        self._up = up
        self._down = down

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) → (num_tokens, hidden_size)."""
        gate = self._gate(states)  # (num_tokens, intermediate_size)
        return self._down(silu(gate).mul_(self._up(states)))


def silu(gate: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(gate), same shape and dtype, with rows that do not depend on each other."""
    if gate.device.type != "cpu":
        return functional.silu(gate)
    # On CPU torch's fused silu rounds differently where its threads meet, so a row would depend on the batch.
    wide = gate.float()
    return wide.neg().exp_().add_(1).reciprocal_().mul_(wide).to(gate.dtype)
