"""A feed-forward layer of many experts, of which each token goes through a few (arXiv:1701.06538).

Owns: the router's choice, and the sum of the chosen experts' outputs.
Does not know: what an expert is made of, attention, norms.
Next on the path: `engine/models/decoder.py`.

An expert computes the rows that chose it, whoever they belong to, with linears whose rows do not depend on each other;
each row adds its experts in the order of their numbers. So a row has the same bits alone and in any batch.
"""

from __future__ import annotations

import torch

from busllm.engine.layers.feed_forward import FeedForward
from busllm.engine.layers.linear import Linear


class MixtureOfExperts:
    """Sum of weight * expert(x) over the `experts_per_token` experts that the router likes best."""

    def __init__(
        self, router: Linear, experts: tuple[FeedForward, ...], *, experts_per_token: int, normalizes: bool
    ) -> None:
        self._router = router
        self._experts = experts
        self._experts_per_token = experts_per_token
        self._normalizes = normalizes

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) → (num_tokens, hidden_size)."""
        shares = self._router(states).float().softmax(dim=-1)  # (num_tokens, num_experts)
        weights, chosen = shares.topk(self._experts_per_token, dim=-1)  # (num_tokens, experts_per_token)
        if self._normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        flat = chosen.flatten()  # pairs of a token and an expert, by token
        order = flat.argsort(stable=True)  # the same pairs, by expert
        tokens = order // self._experts_per_token
        weights = weights.flatten()[order, None]  # (num_pairs, 1)
        out = torch.zeros(states.shape, dtype=torch.float32, device=states.device)
        first = 0
        for expert, count in zip(self._experts, self._counts(flat), strict=True):
            if count:
                own = slice(first, first + count)
                first += count
                # A token chooses an expert once, so no two summands of this call go to the same row.
                out.index_add_(0, tokens[own], expert(states[tokens[own]]).float() * weights[own])
        return out.to(states.dtype)

    def _counts(self, chosen: torch.Tensor) -> list[int]:
        counts: list[int] = torch.bincount(chosen, minlength=len(self._experts)).tolist()
        return counts
