"""What the sampler computes, in plain Python: slow, and short enough to be checked by reading it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from busllm.sampling import SamplingParams

IMPOSSIBLE = -math.inf


def distribution(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    allowed: Sequence[bool] | None = None,
) -> list[float]:
    """The probability of each token to come next.

    Args:
        logits: of the model.
        prompt, output: token ids so far.
        params: of the request.
        eos_token_ids: tokens that end a turn.
        allowed: what a grammar leaves; None = there is none.
    """
    edited = list(logits)
    for token_id in {*prompt, *output}:
        factor = params.repetition_penalty
        edited[token_id] = edited[token_id] / factor if edited[token_id] > 0 else edited[token_id] * factor
    for token_id, count in Counter(output).items():
        edited[token_id] -= params.frequency_penalty * count + params.presence_penalty
    for token_id, value in params.logit_bias:
        edited[token_id] += value
    if len(output) < params.min_tokens:
        for token_id in (*eos_token_ids, *params.stop_token_ids):
            edited[token_id] = IMPOSSIBLE
    if allowed is not None:
        edited = [logit if is_allowed else IMPOSSIBLE for logit, is_allowed in zip(edited, allowed, strict=True)]
    return _filtered(edited, params)


def _filtered(edited: list[float], params: SamplingParams) -> list[float]:
    """Temperature, then top-k, top-p and min-p."""
    best = max(edited)
    if params.temperature == 0:
        winner = edited.index(best)
        return [float(token_id == winner) for token_id in range(len(edited))]
    weights = [math.exp((logit - best) / params.temperature) for logit in edited]
    ranked = sorted(range(len(weights)), key=lambda token_id: (-weights[token_id], token_id))
    kept = ranked[: params.top_k]
    if params.top_p < 1:
        wanted, reached, nucleus = params.top_p * sum(weights[token_id] for token_id in kept), 0.0, []
        for token_id in kept:
            nucleus.append(token_id)
            reached += weights[token_id]
            if reached >= wanted:
                break
        kept = nucleus
    likely = {token_id for token_id in kept if weights[token_id] >= params.min_p}
    total = sum(weights[token_id] for token_id in likely)
    return [weights[token_id] / total if token_id in likely else 0.0 for token_id in range(len(weights))]


def logprobs(logits: Sequence[float]) -> list[float]:
    """Log probabilities that a client is shown: of the model, before any setting."""
    best = max(logits)
    total = math.log(sum(math.exp(logit - best) for logit in logits))
    return [logit - best - total for logit in logits]
