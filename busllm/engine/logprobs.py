"""Log probabilities that go back to the client: of the model's own distribution, before any edit or filter.

Owns: computing them on the device, and turning them into `TokenLogprobs` once the step is collected.
Does not know: whether a row is a prompt token or a new one.
Next on the path: `engine/model_runner.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from busllm.engine.host_copy import copy_to_host
from busllm.plan import TokenLogprobs
from busllm.sampling import MAX_LOGPROBS


@dataclass(frozen=True)
class PendingLogprobs:
    """Log probabilities of some rows, still as tensors.

    Attributes:
        chosen: float32 (num_rows,).
        top_ids, top_values: (num_rows, at least the largest number of alternatives), best first.
        num_top: how many alternatives each row's request asked for.
    """

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor
    num_top: tuple[int, ...]

    def to_host(self) -> PendingLogprobs:
        """Starts copying to the host; `collect` may be called once the step's mark is passed."""
        return PendingLogprobs(
            copy_to_host(self.chosen), copy_to_host(self.top_ids), copy_to_host(self.top_values), self.num_top
        )

    def collect(self) -> list[TokenLogprobs]:
        """One entry per row."""
        rows = zip(
            self.num_top,
            self.chosen.tolist(),
            self.top_ids.tolist(),
            self.top_values.tolist(),
            strict=True,
        )
        return [
            TokenLogprobs(chosen=chosen, top=_ranked(top_ids, values)[:num_top])
            for num_top, chosen, top_ids, values in rows
        ]


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> PendingLogprobs:
    """Log probabilities of given tokens and of the most likely ones.

    Args:
        logits: float32 (num_rows, vocab_size), unedited.
        token_ids: int64 (num_rows,), the tokens that were chosen.
        num_top: alternatives that each row wants; more than the vocabulary gives the vocabulary.
    """
    logprobs = logits.log_softmax(dim=-1)
    # Always as many as may be asked for: which of equals are taken must not depend on what other rows ask for.
    most = min(MAX_LOGPROBS, logits.shape[1]) if any(num_top) else 0
    top = logprobs.topk(most, dim=-1)
    return PendingLogprobs(
        chosen=logprobs.gather(1, token_ids[:, None])[:, 0],
        top_ids=top.indices,
        top_values=top.values,
        num_top=tuple(num_top),
    )


def _ranked(token_ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    """Best first; equals in the order of their ids, as the sampler counts them."""
    return tuple(sorted(zip(token_ids, values, strict=True), key=lambda entry: (-entry[1], entry[0])))
