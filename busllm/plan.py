"""The step plan: what a scheduler asks of its forward pass in one step, and what comes back.

Owns: the Structs that `engine/planner.py` makes, `engine/runner.py` executes and `messages/to_ranks.py` carries to the
other tensor-parallel ranks. Two phases: `launch(plan)` starts a step, `collect(handle)` takes its result; a plan may
name an input token as "what slot s samples in step n", so that the next step can be planned while one runs.
Does not know: why a row was chosen (planner), pages as a resource (pages, radix), tensors (runner).
Next on the path: `engine/runner.py`.
"""

from __future__ import annotations

import msgspec

from busllm.sampling import SamplingParams


class SlotOpened(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence takes a slot (a row of the runner's page table and of its sampler state).

    Attributes:
        slot: 0 … max_running-1; free until this plan.
        params: the request's settings.
        seed: unsigned 64-bit seed of this choice.
        token_ids: packed int32 little-endian: the prompt, then the tokens generated before (retraction, sending on).
        num_prompt_tokens: where the output begins in `token_ids`; positions count from the prompt's first token.
    """

    slot: int
    params: SamplingParams
    seed: int
    token_ids: bytes
    num_prompt_tokens: int


class PagesAssigned(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Entries of one slot's page table: table[slot, first : first + len(pages)] = pages."""

    slot: int
    first: int
    pages: tuple[int, ...]


class PlanRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run of consecutive tokens of one slot to be computed.

    Attributes:
        slot: which sequence.
        start: position of the first token; positions below it already have their KV in the slot's pages.
        num_tokens: 1 for a decode row, the chunk's length for a prefill row.
        token_ids: packed int32 little-endian input tokens, or None when `from_step` names the one input token.
        from_step: the input is what this slot samples in that step (which is still running or just collected).
        samples: whether a token is sampled from the row's last hidden state.
    """

    slot: int
    start: int
    num_tokens: int
    token_ids: bytes | None
    from_step: int | None
    samples: bool


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step. Applied in this order: closed, opened, pages, rows.

    Attributes:
        number: counts up by one per step.
        rows: decode rows first, then prefill chunks.
        num_decode_rows: how many of `rows` are decode rows (one token, prompt complete).
        opened: slots that begin with this step.
        closed: slots whose state may be dropped.
        pages: page-table entries that are new with this step.
        prompt_logprob_rows: indices into `rows` whose every hidden state goes through lm_head.
    """

    number: int
    rows: tuple[PlanRow, ...]
    num_decode_rows: int
    opened: tuple[SlotOpened, ...] = ()
    closed: tuple[int, ...] = ()
    pages: tuple[PagesAssigned, ...] = ()
    prompt_logprob_rows: tuple[int, ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probabilities of one position, of the unfiltered distribution at temperature 1.

    Attributes:
        chosen: of the token that was chosen (or that stands in the prompt).
        top: the most likely (token id, log probability), best first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class SampledRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one row with `samples` gave: 0 … k tokens (one, until speculative decoding).

    Attributes:
        slot: which sequence.
        token_ids: the new tokens, in order.
        logprobs: one per new token when the request asked for them, else empty.
        failure: why the sequence cannot go on, in words for its client; its tokens mean nothing then.
        is_finite: the model's logits are numbers; if not, the tokens mean nothing.
    """

    slot: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    failure: str | None = None
    is_finite: bool = True


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probabilities of prompt tokens: entry i belongs to position `start + i`, predicted from the one before.

    Position 0 has none, so a first chunk begins at 1.
    """

    slot: int
    start: int
    logprobs: tuple[TokenLogprobs, ...]


class StepResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Result of the step with the same number; `rows` in the plan's order, rows without `samples` left out."""

    number: int
    rows: tuple[SampledRow, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
