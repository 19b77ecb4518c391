"""What the sampler remembers of each slot: its request's settings and the tokens so far.

Owns: one row per slot, filled when a sequence takes the slot, and all that depends on the slot's tokens: their counts
(`seen_tokens.py`) and the place in a grammar (`slot_grammars.py`). The tokens are kept on the device, because the next
step may be launched before the host has seen the last token: a row's input "what this slot samples" is read from here.
Does not know: how logits are edited or drawn from, pages.
Next on the path: `engine/sampler.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from busllm.engine.seen_tokens import SeenTokens
from busllm.engine.slot_grammars import SlotGrammars
from busllm.engine.staging import to_device
from busllm.errors import EngineError
from busllm.grammar.compiler import GrammarCompiler
from busllm.plan import SlotOpened
from busllm.sampling import SamplingParams


class SlotShape(msgspec.Struct, frozen=True):
    """Sizes of the slots' state.

    Attributes:
        max_running: slots.
        max_context_tokens: tokens that a slot may hold.
        vocab_size: number of logits.
        eos_token_ids: tokens that end a turn.
        device: where tokens are kept.
    """

    max_running: int
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: torch.device


class Biases(NamedTuple):
    """What is added to the logits of some tokens: int64 and float32 (num_biased,)."""

    token_ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


_UNBIASED = Biases(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
_NO_TOKENS = _UNBIASED.token_ids


class SlotStates:
    """Settings as host arrays, indexed by slot; tokens as one device array.

    Args:
        shape: sizes.
        compiler: of the model's grammars; None = no request has one.

    Attributes:
        temperature, top_p, min_p: float64 (max_running,).
        top_k: int64; the vocabulary's size when the request has none.
        presence, frequency, repetition: float32, penalties.
        seeds: uint64.
        num_prompt_tokens: int64.
        min_tokens: int64, generated tokens before an end is possible.
        has_penalty: bool, whether `seen` counts the slot's tokens.
        has_edits: bool, whether its logits may be edited: penalties, biases, `min_tokens`.
        biases: per slot.
        ending_tokens: per slot, int64 (num_ending,): the tokens that end its sequence; impossible before `min_tokens`.
        grammars: where each slot is in its grammar.
        tokens: int64 (max_running, max_context_tokens) on the device, by position.
    """

    def __init__(self, shape: SlotShape, compiler: GrammarCompiler | None = None) -> None:
        size = shape.max_running
        self.shape = shape
        self.grammars = SlotGrammars(compiler)
        self.seen = SeenTokens(size, shape.max_context_tokens, shape.vocab_size, shape.device)
        self.temperature = np.zeros(size)
        self.top_p = np.ones(size)
        self.min_p = np.zeros(size)
        self.top_k = np.full(size, shape.vocab_size, dtype=np.int64)
        self.presence = np.zeros(size, dtype=np.float32)
        self.frequency = np.zeros(size, dtype=np.float32)
        self.repetition = np.ones(size, dtype=np.float32)
        self.seeds = np.zeros(size, dtype=np.uint64)
        self.num_prompt_tokens = np.zeros(size, dtype=np.int64)
        self.min_tokens = np.zeros(size, dtype=np.int64)
        self.has_penalty = np.zeros(size, dtype=np.bool_)
        self.has_edits = np.zeros(size, dtype=np.bool_)
        self.tokens = torch.zeros((size, shape.max_context_tokens), dtype=torch.int64, device=shape.device)
        self.biases = [_UNBIASED] * size
        self.ending_tokens = [_NO_TOKENS] * size
        self._params: list[SamplingParams | None] = [None] * size

    def open(self, opened: SlotOpened) -> None:
        """A sequence takes a slot.

        Raises:
            EngineError: the slot is taken, or the sequence is longer than a context.
        """
        slot, params = opened.slot, opened.params
        if self._params[slot] is not None:
            raise EngineError(f"slot {slot} was opened while a sequence held it")
        known = np.frombuffer(opened.token_ids, dtype="<i4").astype(np.int64)
        if len(known) > self.shape.max_context_tokens:
            raise EngineError(f"slot {slot} got {len(known)} tokens; it holds {self.shape.max_context_tokens}")
        self._params[slot] = params
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.top_k[slot] = min(params.top_k or self.shape.vocab_size, self.shape.vocab_size)
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        self.seeds[slot] = opened.seed
        self.num_prompt_tokens[slot] = opened.num_prompt_tokens
        self.min_tokens[slot] = params.min_tokens
        self.has_penalty[slot] = (
            params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        )
        self.has_edits[slot] = self.has_penalty[slot] or bool(params.logit_bias) or params.min_tokens > 0
        self.biases[slot] = _biases(params)
        self.ending_tokens[slot] = np.array(self.shape.eos_token_ids + params.stop_token_ids, dtype=np.int64)
        if self.has_penalty[slot]:
            self.seen.open(slot, known, opened.num_prompt_tokens)
        self.grammars.open(slot, params, known[opened.num_prompt_tokens :].tolist())
        self.tokens[slot, : len(known)] = to_device(known, self.shape.device)

    def append(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], token_ids: torch.Tensor) -> None:
        """Each slot has one more token. (Its grammar hears of it when the host does: `engine/step_masks.py`.)

        Args:
            slots, positions: (num_rows,), whose, and where it stands.
            token_ids: int64 (num_rows,), on the device.
        """
        device, new, whose, where = self.shape.device, token_ids, slots, positions
        is_kept = positions < self.shape.max_context_tokens  # a full context needs no next input
        if not is_kept.all():
            kept = np.flatnonzero(is_kept)
            new, whose, where = token_ids[to_device(kept, device)], slots[kept], positions[kept]
        self.tokens[to_device(whose, device), to_device(where, device)] = new
        self.seen.append(slots, token_ids)

    def close(self, slot: int) -> None:
        """The sequence leaves its slot.

        Raises:
            EngineError: nobody held it.
        """
        self.params(slot)
        self._params[slot] = None
        self.seen.close(slot)
        self.grammars.close(slot)

    def are_plain(self, slots: npt.NDArray[np.int64]) -> bool:
        """Whether all of these take the most likely token as it is: no temperature, edits or grammar."""
        if self.has_edits[slots].any() or self.temperature[slots].any():
            return False
        return all(self.grammars.of(slot) is None for slot in slots.tolist())

    def params(self, slot: int) -> SamplingParams:
        """The settings of the sequence that holds a slot.

        Raises:
            EngineError: nobody holds it.
        """
        params = self._params[slot]
        if params is None:
            raise EngineError(f"slot {slot} is used, but no sequence holds it")
        return params


def _biases(params: SamplingParams) -> Biases:
    if not params.logit_bias:
        return _UNBIASED
    token_ids, values = zip(*params.logit_bias, strict=True)
    return Biases(np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32))
