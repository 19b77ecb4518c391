"""What the sampler remembers of each slot: its request's settings and the tokens so far.

Owns: one row per slot, filled when a sequence takes the slot. The tokens are kept on the device, because the next step
may be launched before the host has seen the last token: a row's input "what this slot samples" is read from here.
Does not know: how logits are edited or drawn from, pages.
Next on the path: `engine/sampler.py`.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from busllm.engine.slot_grammars import SlotGrammars
from busllm.engine.staging import to_device
from busllm.errors import EngineError
from busllm.grammar.compiler import GrammarCompiler
from busllm.plan import SlotOpened
from busllm.sampling import Grammar, SamplingParams


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
        has_grammar: bool.
        grammars: where each slot is in its grammar.
        tokens: int64 (max_running, max_context_tokens) on the device, by position.
    """

    def __init__(self, shape: SlotShape, compiler: GrammarCompiler | None = None) -> None:
        self.shape = shape
        self.grammars = SlotGrammars(compiler)
        size = shape.max_running
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
        self.has_grammar = np.zeros(size, dtype=np.bool_)
        self.tokens = torch.zeros((size, shape.max_context_tokens), dtype=torch.int64, device=shape.device)
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
        self.has_grammar[slot] = params.grammar is not None
        self.tokens[slot, : len(known)] = to_device(known, self.shape.device)

    def close(self, slot: int) -> None:
        """The sequence leaves its slot.

        Raises:
            EngineError: nobody held it.
        """
        self.params(slot)
        self._params[slot] = None
        self.grammars.close(slot)

    def params(self, slot: int) -> SamplingParams:
        """The settings of the sequence that holds a slot.

        Raises:
            EngineError: nobody holds it.
        """
        params = self._params[slot]
        if params is None:
            raise EngineError(f"slot {slot} is used, but no sequence holds it")
        return params

    def grammar(self, slot: int) -> Grammar:
        """The grammar of the sequence that holds a slot.

        Raises:
            EngineError: nobody holds it, or it has none.
        """
        grammar = self.params(slot).grammar
        if grammar is None:
            raise EngineError(f"slot {slot} has no grammar")
        return grammar

    def ending_tokens(self, slot: int) -> tuple[int, ...]:
        """Tokens that end the sequence in a slot; impossible before `min_tokens`."""
        return self.shape.eos_token_ids + self.params(slot).stop_token_ids
