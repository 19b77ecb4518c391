"""Drives an `Engine` turn by turn and keeps what it gives, as its owner would.

Owns: the record of every sequence (tokens joined by index, the end, events), and the rules that any engine's output
must keep: the right attempt, no hole, no repetition, one end.
Does not know: the runner. With `NullRunner`, `null_outcome` says what must come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from busllm.engine.engine import Engine
from busllm.engine.null import NULL_EOS_TOKEN_ID, NullSequence
from busllm.engine.sequence import FinishReason, SequenceEvent, SequenceRequest, StepOutput
from busllm.errors import BusllmError
from busllm.plan import TokenLogprobs
from busllm.sampling import SamplingParams

Key = tuple[str, int]


def sequence_request(
    uid: str,
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    *,
    choice: int = 0,
    attempt: int = 1,
    output: Sequence[int] = (),
    seed: int = 0,
    priority: int = 0,
    namespace: bytes = b"",
) -> SequenceRequest:
    """A request from plain lists; greedy with 8 tokens unless told otherwise."""
    return SequenceRequest(
        uid,
        choice,
        attempt,
        np.array(prompt, dtype=np.int32),
        np.array(output, dtype=np.int32),
        params or SamplingParams(temperature=0.0, max_tokens=8),
        seed,
        priority,
        namespace,
    )


def null_outcome(
    request: SequenceRequest, *, max_context_tokens: int, eos_one_in: int | None = None
) -> tuple[list[int], FinishReason]:
    """What the null model answers to a request, from the definition: all output ids, and why they end."""
    params = request.params
    num_prompt_tokens = len(request.prompt_ids)
    room = max_context_tokens - num_prompt_tokens
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {NULL_EOS_TOKEN_ID})
    sequence = NullSequence(request.prompt_ids.astype("<i4").tobytes(), params, request.seed, eos_one_in)
    output: list[int] = request.output_ids.tolist()
    while not (output and output[-1] in ends):
        if len(output) >= limit:
            return output, FinishReason.LENGTH
        output.append(sequence.token(num_prompt_tokens + len(output)))
    return output, FinishReason.STOP


@dataclass
class Record:
    """What an owner knows of one sequence.

    Attributes:
        attempt: the current one.
        output: generated ids, in order.
        finish_reason: set by the end.
        logprobs: one per token of the current attempt, when asked for.
        prompt_logprobs: when asked for.
    """

    attempt: int
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class EngineDriver:
    """Submits, steps, checks.

    Args:
        engine: under test; its page accounting is checked after every turn.

    Attributes:
        records: by (uid, choice).
        events: all, in order.
        failures: by (uid, choice), why the engine gave a sequence up.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failures: dict[Key, BusllmError] = {}
        self.records: dict[Key, Record] = {}
        self.events: list[SequenceEvent] = []

    def submit(self, request: SequenceRequest) -> None:
        """Submits; a later attempt goes on from the request's `output_ids`."""
        self.engine.submit(request)
        self.records[request.uid, request.choice] = Record(request.attempt, request.output_ids.tolist())

    def step(self) -> StepOutput:
        """One turn, checked."""
        output = self.engine.step()
        self.engine.check_integrity()
        for tokens in output.tokens:
            record = self.records[tokens.uid, tokens.choice]
            assert tokens.attempt == record.attempt, f"{tokens} is not of attempt {record.attempt}"
            assert tokens.index == len(record.output), f"{tokens} does not follow {len(record.output)} tokens"
            assert record.finish_reason is None, f"{tokens} comes after the end"
            record.output += tokens.token_ids
            record.logprobs += tokens.logprobs
            record.finish_reason = tokens.finish_reason
            record.prompt_logprobs = tokens.prompt_logprobs or record.prompt_logprobs
        for failure in output.failures:
            key = (failure.request.uid, failure.request.choice)
            assert failure.request.attempt == self.records[key].attempt, f"{failure} is not of the current attempt"
            self.failures[key] = failure.error
        self.events += output.events
        return output

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still work after {max_steps} steps")

    def names(self, uid: str, choice: int = 0) -> list[str]:
        """Names of a sequence's events, in order."""
        return [event.name for event in self.events if (event.uid, event.choice) == (uid, choice)]

    def data(self, uid: str, name: str, choice: int = 0) -> dict[str, int | str]:
        """Data of the last event of that name."""
        return [e.data for e in self.events if (e.uid, e.choice, e.name) == (uid, choice, name)][-1]
