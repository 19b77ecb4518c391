"""A slot gives its next sequence nothing of the one before; each value that would stay behind, on purpose, is seen."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from busllm.engine.sampler import sample
from busllm.engine.slot_states import SlotShape, SlotStates
from busllm.errors import EngineError
from busllm.grammar.compiler import GrammarCompiler
from busllm.grammar.vocabulary import Vocabulary
from busllm.plan import SlotOpened
from busllm.sampling import Grammar, GrammarKind, SamplingParams

VOCAB = 60
EOS = 3
LETTERS = "".join(chr(code) for code in range(ord("A"), ord("A") + VOCAB))
COMPILER = GrammarCompiler(
    lambda: Vocabulary(
        tuple(letter.encode() for letter in LETTERS),
        frozenset({EOS}),
        (EOS,),
        lambda text: list(map(LETTERS.index, text)),
    )
)
NUM_STEPS = 12
SHORT, LONG = [7, 8, 9], [14, 13, 12, 11, 10, 9, 8, 7]


def drawn(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, **settings)


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **settings)


GRAMMAR = Grammar(GrammarKind.CHOICE, json.dumps(["HIJKLMNOPQRSTUVW"]))

# What stays behind, the settings and prompt of who leaves, and the settings of who comes, to whom it would matter.
CASES: dict[str, tuple[SamplingParams, list[int], SamplingParams]] = {
    "temperature": (greedy(), SHORT, drawn()),
    "top_p": (drawn(top_p=0.01), SHORT, drawn()),
    "min_p": (drawn(min_p=1.0), SHORT, drawn()),
    "top_k": (drawn(top_k=1), SHORT, drawn()),
    "presence": (greedy(presence_penalty=2.0), SHORT, greedy(frequency_penalty=0.01)),
    "frequency": (greedy(frequency_penalty=2.0), SHORT, greedy(presence_penalty=0.01)),
    "repetition": (greedy(repetition_penalty=3.0), SHORT, greedy(presence_penalty=0.01)),
    "has_penalty": (greedy(), SHORT, greedy(repetition_penalty=3.0)),
    "seeds": (drawn(), SHORT, drawn()),
    "num_prompt_tokens": (greedy(), LONG, greedy(min_tokens=3, logit_bias=((EOS, 100.0),))),
    "min_tokens": (greedy(min_tokens=8), SHORT, greedy(logit_bias=((EOS, 100.0),))),
    "has_edits": (greedy(), SHORT, greedy(logit_bias=((20, 100.0),))),
    "biases": (greedy(logit_bias=((20, 100.0),)), SHORT, greedy(presence_penalty=0.01)),
    "ending_tokens": (greedy(stop_token_ids=(30,)), SHORT, greedy(min_tokens=3)),
    "_params": (greedy(logprobs=2), SHORT, greedy()),
    "seen": (greedy(repetition_penalty=1.5), SHORT, greedy(repetition_penalty=3.0)),
    "grammars": (greedy(grammar=GRAMMAR), SHORT, greedy()),
    "tokens": (greedy(), LONG, greedy()),
}


class ForgetfulStates(SlotStates):
    """Something of the sequence before stays in its slot."""

    def __init__(self, shape: SlotShape, what: str) -> None:
        super().__init__(shape, COMPILER)
        self._what = what
        self._before: Any = None

    def open(self, opened: SlotOpened) -> None:
        super().open(opened)
        if self._before is not None:
            getattr(self, self._what)[opened.slot] = self._before

    def close(self, slot: int) -> None:
        if self._what == "grammars":
            state = self.grammars.of(slot)
            super().close(slot)
            if state is not None:
                self.grammars._states[slot] = state
        elif self._what == "seen":
            counts = int(self.seen._num_known[slot])
            super().close(slot)
            self.seen._num_known[slot] = counts
            self.seen.open = lambda *_: None  # type: ignore[method-assign]
        else:
            value = getattr(self, self._what)[slot]
            self._before = value.clone() if isinstance(value, torch.Tensor) else value
            super().close(slot)


def shape() -> SlotShape:
    return SlotShape(1, 64, VOCAB, (EOS,), torch.device("cpu"))


def answer(states: SlotStates, params: SamplingParams, prompt: list[int], seed: int) -> list[int]:
    """What a sequence gets in slot 0, with how many log probabilities, and all tokens that a model would read there."""
    source = torch.Generator().manual_seed(4)
    states.open(SlotOpened(0, params, seed, np.array(prompt, dtype="<i4").tobytes(), len(prompt)))
    slots, state, output, num_logprobs = np.array([0]), states.grammars.of(0), [], 0
    for position in range(len(prompt), len(prompt) + NUM_STEPS):
        logits = torch.randn(1, VOCAB, generator=source)
        logits[0, 30] += 3  # so that penalties have something to do
        chosen = sample(logits, slots, np.array([position]), states)
        assert not chosen.failures
        states.append(slots, np.array([position]), chosen.token_ids)
        output += chosen.token_ids.tolist()
        num_logprobs += len(chosen.logprob_rows)
        if state is not None:
            state.add(output[-1])
    read = states.tokens[0, : len(prompt) + NUM_STEPS].tolist()
    states.close(0)
    return [*output, num_logprobs, *read]


def check(states: SlotStates, case: str) -> None:
    """Compares with a slot that nobody had before."""
    leaves, prompt, comes = CASES[case]
    answer(states, leaves, prompt, seed=1)
    assert answer(states, comes, SHORT, seed=0) == answer(SlotStates(shape(), COMPILER), comes, SHORT, seed=0)


@pytest.mark.parametrize("case", CASES)
def test_a_sequence_gets_the_same_in_a_used_slot_as_in_a_new_one(case: str) -> None:
    check(SlotStates(shape(), COMPILER), case)


@pytest.mark.parametrize("case", CASES)
def test_what_stays_in_a_slot_is_noticed(case: str) -> None:
    with pytest.raises((AssertionError, EngineError)):
        check(ForgetfulStates(shape(), case), case)


def test_everything_that_a_slot_has_is_among_the_cases() -> None:
    states = SlotStates(shape(), COMPILER)
    assert set(vars(states)) - {"shape"} == set(CASES)
