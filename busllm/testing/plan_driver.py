"""Drives a runner with step plans of its own, without an engine.

Owns: the simplest scheduler there is: every sequence gets a slot and scattered pages at once, and each step holds all
decode rows and one chunk of every prompt. Pages are never given back, so that one sequence can be told to read
another's.
Does not know: prefix trees, admission, retraction. Tests of a runner or of an attention backend use it to choose batch,
chunks and pages exactly.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from busllm.engine.runner import Runner
from busllm.plan import PagesAssigned, PlanRow, SlotOpened, StepPlan, StepResult, TokenLogprobs
from busllm.sampling import SamplingParams


@dataclass
class DrivenSequence:
    """What a sequence was asked for, and what came out of it.

    Attributes:
        prompt: token ids.
        params: settings; `max_tokens` (16 when None) is the only end.
        seed: of the choice.
        chunk_tokens: prompt tokens per step; None = all at once.
        start_step: the step of the run in which it begins.
        cached: a sequence that is done, and how many tokens (whole pages) to read from its pages.
        by_reference: input tokens are named as what the slot sampled.
        output: generated ids.
        logprobs: one per generated id when the params ask for them.
        prompt_logprobs: by position, from 1 on.
        pages: the pages that it used.
        slot: where it runs; None before and after.
        computed: positions that have their key and value.
        sampled_in: the step that gave the last token.
    """

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0, logprobs=0))
    seed: int = 0
    chunk_tokens: int | None = None
    start_step: int = 0
    cached: tuple[DrivenSequence, int] | None = None
    by_reference: bool = False
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    computed: int = 0
    sampled_in: int | None = None

    @property
    def length(self) -> int:
        """Generated tokens at which it ends."""
        return 16 if self.params.max_tokens is None else self.params.max_tokens


class PlanDriver:
    """Makes plans for one runner, which it allocates."""

    def __init__(
        self,
        runner: Runner,
        *,
        page_tokens: int = 16,
        num_pages: int = 2048,
        max_running: int = 64,
        max_context_tokens: int = 512,
        seed: int = 0,
    ) -> None:
        runner.allocate(
            num_pages=num_pages,
            page_tokens=page_tokens,
            max_running=max_running,
            max_context_tokens=max_context_tokens,
        )
        self._runner = runner
        self._page_tokens = page_tokens
        self._free_pages = list(range(num_pages))
        random.Random(seed).shuffle(self._free_pages)  # pages that follow each other would hide a wrong page table
        self._slots = list(range(max_running))
        self._step = 0
        self._first_step = 0
        self._closed: list[int] = []

    def run(self, *sequences: DrivenSequence) -> tuple[DrivenSequence, ...]:
        """Runs sequences to their ends, all in one batch; returns them."""
        self._first_step = self._step
        while any(len(sequence.output) < sequence.length for sequence in sequences):
            self._turn(sequences)
        return sequences

    def _turn(self, sequences: Sequence[DrivenSequence]) -> None:
        now = self._step - self._first_step
        live = [s for s in sequences if s.start_step <= now and len(s.output) < s.length]
        closed, self._closed = tuple(self._closed), []
        opened = tuple(self._open(sequence) for sequence in live if sequence.slot is None)
        decoding = [sequence for sequence in live if sequence.computed >= len(sequence.prompt)]
        prefilling = [sequence for sequence in live if sequence.computed < len(sequence.prompt)]
        rows = [*(self._decode_row(s) for s in decoding), *(self._prefill_row(s) for s in prefilling)]
        ordered = [*decoding, *prefilling]
        plan = StepPlan(
            number=self._step,
            rows=tuple(rows),
            num_decode_rows=len(decoding),
            opened=opened,
            closed=closed,
            pages=tuple(
                entry for pair in zip(ordered, rows, strict=True) if (entry := self._assign(*pair)) is not None
            ),
            prompt_logprob_rows=tuple(
                index for index, sequence in enumerate(ordered) if self._wants_prompt_logprobs(sequence)
            ),
        )
        self._take(self._runner.collect(self._runner.launch(plan)), ordered, rows)
        self._step += 1

    def _open(self, sequence: DrivenSequence) -> SlotOpened:
        slot = sequence.slot = self._slots.pop(0)
        if sequence.cached is not None:
            source, num_tokens = sequence.cached
            sequence.pages = source.pages[: num_tokens // self._page_tokens]
            sequence.computed = num_tokens
        return SlotOpened(slot, sequence.params, sequence.seed, _packed(sequence.prompt), len(sequence.prompt))

    def _decode_row(self, sequence: DrivenSequence) -> PlanRow:
        start = sequence.computed
        by_reference = sequence.by_reference
        return PlanRow(
            slot=_slot(sequence),
            start=start,
            num_tokens=1,
            token_ids=None if by_reference else _packed(sequence.output[-1:]),
            from_step=sequence.sampled_in if by_reference else None,
            samples=True,
        )

    def _prefill_row(self, sequence: DrivenSequence) -> PlanRow:
        start = sequence.computed
        end = len(sequence.prompt)
        if sequence.chunk_tokens is not None:
            end = min(end, start + sequence.chunk_tokens)
        return PlanRow(
            slot=_slot(sequence),
            start=start,
            num_tokens=end - start,
            token_ids=_packed(sequence.prompt[start:end]),
            from_step=None,
            samples=end == len(sequence.prompt),
        )

    def _assign(self, sequence: DrivenSequence, row: PlanRow) -> PagesAssigned | None:
        """Pages that a row is the first to need; with the first row the shared ones as well."""
        is_first = sequence.cached is not None and row.start == sequence.cached[1]
        first = 0 if is_first else len(sequence.pages)
        needed = -(-(row.start + row.num_tokens) // self._page_tokens)
        while len(sequence.pages) < needed:
            sequence.pages.append(self._free_pages.pop())
        new = tuple(sequence.pages[first:])
        return PagesAssigned(row.slot, first, new) if new else None

    def _wants_prompt_logprobs(self, sequence: DrivenSequence) -> bool:
        return sequence.params.prompt_logprobs is not None and sequence.computed < len(sequence.prompt)

    def _take(self, result: StepResult, sequences: Sequence[DrivenSequence], rows: Sequence[PlanRow]) -> None:
        by_slot = {row.slot: sequence for row, sequence in zip(rows, sequences, strict=True)}
        for row, sequence in zip(rows, sequences, strict=True):
            sequence.computed = row.start + row.num_tokens
        for prompt in result.prompt_logprobs:
            by_slot[prompt.slot].prompt_logprobs.extend(prompt.logprobs)
        for sampled in result.rows:
            sequence = by_slot[sampled.slot]
            sequence.output.extend(sampled.token_ids)
            sequence.logprobs.extend(sampled.logprobs)
            sequence.sampled_in = result.number
            if len(sequence.output) >= sequence.length:
                self._closed.append(sampled.slot)
                self._slots.append(sampled.slot)
                sequence.slot = None


def _slot(sequence: DrivenSequence) -> int:
    if sequence.slot is None:
        raise ValueError("the sequence does not run")
    return sequence.slot


def _packed(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()
