"""A sequence while an engine has it: its tokens, how far they are computed, which pages it uses.

Owns: the mutable record that queue, planner and engine share, and the rule when a sequence ends by itself.
Does not know: other sequences, why it is chosen for a step.
Next on the path: `engine/waiting.py`, `engine/planner.py`.

Positions. `num_tokens` are known; `num_sampling` more are being sampled in launched steps. `num_planned` positions are
computed or being computed, `num_computed` of them have landed. At depth 0 the two pairs agree between steps.
"""

from __future__ import annotations

import numpy as np

from busllm.engine.radix import BYTES_PER_TOKEN, Node
from busllm.engine.sequence import FinishReason, SequenceRequest, SequenceState
from busllm.errors import EngineError
from busllm.grammar.compiler import CompiledGrammar
from busllm.plan import PlanRow, PromptLogprobs, SampledRow, TokenLogprobs

Key = tuple[str, int]
Rank = tuple[int, int, int]  # priority (negated), virtual deadline, arrival


def pack_ids(ids: np.ndarray) -> bytes:
    """Packs token ids as int32 little-endian."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


class LiveSequence:
    """One (uid, choice) in an engine. Compared and hashed by identity.

    Attributes:
        attempt: the current one; an adoption raises it.
        tokens: packed int32 little-endian: prompt, then output.
        max_output_tokens: the request's limit and what the context leaves, the smaller.
        ends: token ids that end it.
        scores_prompt: prompt logprobs are to be computed and delivered.
        num_inherited_tokens: output tokens that came with the request, from earlier attempts.
        arrival: counts up per submitted sequence.
        rank: order in which waiting sequences are admitted and chunks are computed, smallest first.
        prefill_end: position up to which this admission computes chunks; from there on it decodes.
        sampled_in: number of the step that samples the newest token.
        in_flight: launched steps that have a row of it.
        table: its pages; entry i holds the positions from i * page_tokens.
        num_assigned: entries of `table` that a plan has told the runner.
        node: deepest tree node that it has locked.
        num_entered: depth of `node`: pages of `table` that are done and known to the tree.
        duplicates: pages of its table whose content the tree holds in another page.
        grammar: its compiled grammar, once it is there; held here so that nobody compiles it again while it lives.
        held: stays out of steps (back-pressure).
        retracting: gives its pages back as soon as no launched step uses them.
        prefix_wait_until: step at which it stops waiting for another's prefix; None = has not waited yet.
    """

    def __init__(
        self, request: SequenceRequest, arrival: int, eos_token_ids: tuple[int, ...], max_context_tokens: int
    ) -> None:
        params = request.params
        self.arrival = arrival
        self.rank: Rank  # given by the planner, whenever it queues the sequence
        self.request = request
        self.key: Key = (request.uid, request.choice)
        self.attempt = request.attempt
        self.namespace = request.cache_namespace
        self.tokens = bytearray(pack_ids(request.prompt_ids) + pack_ids(request.output_ids))
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_tokens = self.num_prompt_tokens + len(request.output_ids)
        room = max_context_tokens - self.num_prompt_tokens
        self.max_output_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        # Under a grammar the end of turn comes where it is wanted, and nothing may follow it.
        ignores_eos = params.ignore_eos and params.grammar is None
        self.ends = frozenset(params.stop_token_ids + (() if ignores_eos else eos_token_ids))
        self.logprobs: list[TokenLogprobs] = []
        # An earlier attempt delivered the prompt's logprobs with its first token.
        self.scores_prompt = params.prompt_logprobs is not None and not len(request.output_ids)
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.num_inherited_tokens = len(request.output_ids)
        self.grammar: CompiledGrammar | None = None
        self.was_admitted = False
        self.ended = False
        self.held = False
        self.prefix_wait_until: int | None = None
        self._uncompute()

    def _uncompute(self) -> None:
        self.slot: int | None = None
        self.opened = False
        self.prefill_end = 0
        self.num_planned = 0
        self.num_computed = 0
        self.num_sampling = 0
        self.sampled_in: int | None = None
        self.in_flight = 0
        self.planned_in: int | None = None
        self.table: list[int] = []
        self.num_assigned = 0
        self.node: Node | None = None
        self.num_entered = 0
        self.duplicates: list[int] = []
        self.retracting = False

    # ------------------------------------------------------------ where it is

    @property
    def seniority(self) -> tuple[int, int]:
        """Order in which running sequences are served; the last one is retracted first."""
        return (-self.request.priority, self.arrival)

    @property
    def state(self) -> SequenceState:
        """Waiting until it has a slot."""
        return SequenceState.WAITING if self.slot is None else SequenceState.RUNNING

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, by this and earlier attempts."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether chunks are still to be planned."""
        return self.num_planned < self.prefill_end

    @property
    def has_to_score_prompt(self) -> bool:
        """Whether its chunks are to give prompt logprobs; known once there is output, even if it computes again."""
        return self.scores_prompt and not self.num_output_tokens

    @property
    def wants_token(self) -> bool:
        """Whether a row that ends at its newest token is to sample the next one."""
        return self.num_output_tokens + self.num_sampling < self.max_output_tokens

    @property
    def can_run(self) -> bool:
        """Whether a step may have a row of it (when there is something to compute)."""
        return self.slot is not None and not self.held and not self.retracting

    # ------------------------------------------------------------ tokens

    def packed(self, first: int, last: int) -> bytes:
        """Packed ids of the positions first … last-1."""
        return bytes(self.tokens[first * BYTES_PER_TOKEN : last * BYTES_PER_TOKEN])

    def output_ids(self, first: int) -> tuple[int, ...]:
        """Generated tokens from index `first` on."""
        packed = self.packed(self.num_prompt_tokens + first, self.num_tokens)
        return tuple(np.frombuffer(packed, dtype="<i4").tolist())

    def take(self, sampled: SampledRow) -> None:
        """Adds generated tokens."""
        for token_id in sampled.token_ids:
            self.tokens += token_id.to_bytes(BYTES_PER_TOKEN, "little")
        self.num_tokens += len(sampled.token_ids)
        self.logprobs.extend(sampled.logprobs)

    def score_prompt(self, scores: PromptLogprobs) -> None:
        """Adds log probabilities of prompt tokens.

        Raises:
            EngineError: they do not go on where the last ones ended.
        """
        if scores.start != len(self.prompt_logprobs):
            raise EngineError(
                f"prompt log probabilities of position {scores.start} came, {len(self.prompt_logprobs)} is next"
            )
        self.prompt_logprobs.extend(scores.logprobs)

    def finish_reason(self) -> FinishReason | None:
        """Whether what is known of it is complete: an ending token counts, and is part of the output."""
        if self.num_output_tokens:
            last = int.from_bytes(self.tokens[-BYTES_PER_TOKEN:], "little", signed=True)
            if last in self.ends:
                return FinishReason.STOP
        if self.num_output_tokens >= self.max_output_tokens:
            return FinishReason.LENGTH
        return None

    # ------------------------------------------------------------ steps

    def launched(self, row: PlanRow, number: int) -> None:
        """A step with `row` will run."""
        self.num_planned += row.num_tokens
        self.in_flight += 1
        self.planned_in = number
        if row.samples:
            self.num_sampling += 1
            self.sampled_in = number

    def landed(self, row: PlanRow) -> None:
        """The step with `row` is done."""
        self.in_flight -= 1
        self.num_computed = row.start + row.num_tokens
        if row.samples:
            self.num_sampling -= 1

    def start_again(self) -> None:
        """Forgets what was computed (its pages are given back), keeps what was generated."""
        self._uncompute()
        if not self.num_output_tokens:
            self.prompt_logprobs = [None]
