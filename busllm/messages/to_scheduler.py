"""What rank 0 of a scheduler receives: `generate.<scheduler>.<uid>` and `stop.<scheduler>`.

Owns: `Generate`, which starts sequences or carries them on, and `StopMatched`.
Next on the path: `stages/scheduler/`, then `messages/to_detokenizer.py`.
"""

from __future__ import annotations

import msgspec

from busllm.ids import check_tokens
from busllm.messages.codec import Decoder, check_numbers
from busllm.messages.parts import Part
from busllm.sampling import SamplingParams


class ChoiceStart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one choice begins or goes on.

    Attributes:
        choice: its number in the request.
        output_ids: packed int32 tokens that the client has already; empty at the start.
        delivered_chars: length of the text that the client has already.
    """

    choice: int
    output_ids: bytes = b""
    delivered_chars: int = 0


class Generate(msgspec.Struct, frozen=True, array_like=True, tag="generate", gc=False):
    """Sequences of one prompt. The unit is (uid, choice, attempt); a higher attempt of what runs already is adopted.

    Attributes:
        uid, attempt, frontend: as in `Tokenize`.
        prompt_ids: packed int32 token ids.
        choices: the unfinished choices of this prompt.
        params, seed, priority, cache_namespace, avoid: as in `Tokenize`.
    """

    uid: str
    attempt: int
    frontend: str
    prompt_ids: bytes
    choices: tuple[ChoiceStart, ...]
    params: SamplingParams
    seed: int
    priority: int = 0
    cache_namespace: bytes = b""
    avoid: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_tokens(self.uid, self.frontend)
        check_numbers(self.attempt, *(number for one in self.choices for number in (one.choice, one.delivered_chars)))


class StopMatched(msgspec.Struct, frozen=True, array_like=True, tag="stop", gc=False):
    """Sequences (uid, choice, attempt) that a stop string ended: nobody wants their next tokens."""

    sequences: tuple[tuple[str, int, int], ...]


ToScheduler = Generate | StopMatched | Part
decoder: Decoder[ToScheduler] = Decoder(ToScheduler)
