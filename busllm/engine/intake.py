"""Looks at a request before the engine takes it.

Owns: the checks that only the engine can make (context, pool, vocabulary) and the question whether a later attempt can
go on with what an earlier one has computed.
Does not know: queues, pages in use, JSON.
Next on the path: `engine/engine.py`.
"""

from __future__ import annotations

import numpy as np

from busllm.engine.config import EngineConfig
from busllm.engine.live_sequence import LiveSequence, pack_ids
from busllm.engine.runner import ModelInfo
from busllm.engine.sequence import SequenceRequest
from busllm.errors import ContextLengthExceeded, InvalidRequest, NeverFits
from busllm.sampling import check_sampling


def check_request(request: SequenceRequest, model: ModelInfo, config: EngineConfig) -> None:
    """Refuses what this engine can never compute.

    Raises:
        InvalidRequest: no prompt, a token id outside the vocabulary, or a sampling parameter out of range.
        ContextLengthExceeded: the prompt leaves no room for a token.
        NeverFits: the prompt alone needs more pages than there are.
    """
    check_sampling(request.params, model.vocab_size)
    num_prompt_tokens = len(request.prompt_ids)
    if num_prompt_tokens == 0:
        raise InvalidRequest("The prompt has no tokens; it must have at least one.", param="prompt")
    for ids in (request.prompt_ids, request.output_ids):
        _check_ids(ids, model.vocab_size)
    max_context_tokens = min(config.max_context_tokens, model.max_context_tokens)
    if num_prompt_tokens >= max_context_tokens:
        raise ContextLengthExceeded(num_prompt_tokens, max_context_tokens)
    capacity_tokens = config.num_pages * config.page_tokens
    if num_prompt_tokens > capacity_tokens:
        raise NeverFits(num_prompt_tokens, capacity_tokens)


def _check_ids(ids: np.ndarray, vocab_size: int) -> None:
    if not len(ids):
        return
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0 or largest >= vocab_size:
        bad = smallest if smallest < 0 else largest
        raise InvalidRequest(
            f"The prompt has the token id {bad}; this model has 0 to {vocab_size - 1}.", param="prompt"
        )


def can_adopt(seq: LiveSequence, request: SequenceRequest) -> bool:
    """Whether a live sequence can go on as the later attempt `request`.

    It can when it is the same prompt, and what it has generated begins with what the request says was delivered. Then
    the owner only misses tokens. Log probabilities are known for the tokens that were generated here.
    """
    delivered = len(request.output_ids)
    if delivered < seq.num_inherited_tokens and request.params.logprobs is not None:
        return False
    known = seq.packed(0, seq.num_prompt_tokens + delivered)
    return known == pack_ids(request.prompt_ids) + pack_ids(request.output_ids)
