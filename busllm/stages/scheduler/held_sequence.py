"""What the event loop knows of a sequence that its engine holds.

Owns: whose the sequence is, where its text is made, how far it is.
"""

from __future__ import annotations

import numpy as np

from busllm.engine.sequence import SequenceRequest, SequenceTokens
from busllm.messages.codec import unpack_ids
from busllm.messages.to_detokenizer import SequenceOpened
from busllm.messages.to_scheduler import ChoiceStart, Generate
from busllm.sampling import choice_seed
from busllm.text.decoder import NUM_PROMPT_TAIL_IDS


class HeldSequence:
    """One sequence of one attempt.

    Attributes:
        generate, start: the message that brought it.
        detokenizer: instance that makes its text, None until its first tokens.
        handle: its number there.
        next_index: index of the token that comes next.
        is_admitted: it has begun to run.
        cached_tokens: prompt tokens found in the prefix cache.
        backlog: tokens that wait for a detokenizer.
        lost_detokenizer: its detokenizer is gone; the owner sends it on.
    """

    def __init__(self, generate: Generate, start: ChoiceStart) -> None:
        self.generate = generate
        self.start = start
        self.detokenizer: str | None = None
        self.handle = 0
        self.next_index = len(start.output_ids) // 4
        self.is_admitted = False
        self.cached_tokens = 0
        self.backlog: list[SequenceTokens] = []
        self.lost_detokenizer = False

    @property
    def key(self) -> tuple[str, int]:
        """(uid, choice)."""
        return self.generate.uid, self.start.choice

    @property
    def state(self) -> str:
        """What a probe is told: lost (its detokenizer is), waiting (for its turn or a detokenizer) or running."""
        if self.lost_detokenizer:
            return "lost"
        return "running" if self.is_admitted and not self.backlog else "waiting"

    @property
    def must_wait(self) -> bool:
        """Whether computing more would only pile up."""
        return self.lost_detokenizer or bool(self.backlog)

    def request(self, prompt_ids: np.ndarray) -> SequenceRequest:
        """What the engine is given; `prompt_ids` are those of the message, unpacked once for all choices."""
        generate, start = self.generate, self.start
        return SequenceRequest(
            uid=generate.uid,
            choice=start.choice,
            attempt=generate.attempt,
            prompt_ids=prompt_ids,
            output_ids=unpack_ids(start.output_ids),
            params=generate.params,
            seed=choice_seed(generate.seed, start.choice),
            priority=generate.priority,
            cache_namespace=generate.cache_namespace,
        )

    def opened(self) -> SequenceOpened:
        """The message that opens it at its detokenizer."""
        generate, start = self.generate, self.start
        return SequenceOpened(
            handle=self.handle,
            uid=generate.uid,
            choice=start.choice,
            attempt=generate.attempt,
            frontend=generate.frontend,
            prompt_tail=generate.prompt_ids[-4 * NUM_PROMPT_TAIL_IDS :],
            output_ids=start.output_ids,
            delivered_chars=start.delivered_chars,
            stop=generate.params.stop,
            skip_special_tokens=generate.params.skip_special_tokens,
            prompt_tokens=len(unpack_ids(generate.prompt_ids)),
            cached_tokens=self.cached_tokens,
            min_tokens=generate.params.min_tokens,
            stop_token_ids=generate.params.stop_token_ids,
        )
