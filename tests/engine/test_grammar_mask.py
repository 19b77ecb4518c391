"""The mask in the sampler: nothing gets past it, and it reaches its own row only."""

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
from tests.engine.grammar_cases import NUMBERS, params

VOCAB = 300
EOS = 256


def byte_compiler() -> GrammarCompiler:
    tokens = tuple(bytes([value]) for value in range(256)) + (b"<eos>",) + (b"",) * (VOCAB - 257)
    return GrammarCompiler(lambda: Vocabulary(tokens, frozenset({EOS}), (EOS,), lambda text: list(text.encode())))


def choose(
    logits: torch.Tensor, *rows: SamplingParams, output: bytes = b"", compiler: GrammarCompiler | None = None
) -> tuple[list[int], dict[int, str]]:
    states = SlotStates(SlotShape(len(rows), 64, VOCAB, (EOS,), torch.device("cpu")), compiler or byte_compiler())
    known = np.array([1, 2, 3, *output], dtype="<i4").tobytes()
    for slot, row in enumerate(rows):
        states.open(SlotOpened(slot, row, 7, known, 3))
    slots, positions = np.arange(len(rows)), np.full(len(rows), 3 + len(output))
    sampled = sample(logits.clone(), slots, positions, states)
    return [row.token_ids[0] for row in sampled.rows(slots.tolist())], dict(sampled.failures)


def greedy(grammar: Grammar | None, **values: Any) -> SamplingParams:
    return params(grammar, temperature=0.0, **values)


def test_the_mask_reaches_its_own_row_only() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    free = logits.argmax(dim=-1).tolist()
    yes = Grammar(GrammarKind.CHOICE, '["yes"]')
    tokens, failures = choose(logits, greedy(None), greedy(yes), greedy(None))
    assert tokens == [free[0], ord("y"), free[2]]
    assert not failures


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 2.0])
def test_no_other_setting_gets_past_the_mask(temperature: float) -> None:
    yes = Grammar(GrammarKind.CHOICE, '["yes"]')
    logits = torch.full((1, VOCAB), 20.0)
    logits[0, ord("y")] = -80.0
    against = params(
        yes,
        temperature=temperature,
        logit_bias=((ord("y"), -100.0), (7, 100.0)),
        top_k=1,
        top_p=0.1,
        min_p=0.5,
        frequency_penalty=2.0,
        repetition_penalty=2.0,
    )
    assert choose(logits, against) == ([ord("y")], {})
    logits[0] = torch.nan
    logits[0, 7] = torch.inf
    assert choose(logits, against) == ([ord("y")], {})


def test_before_min_tokens_an_end_comes_only_when_nothing_else_can() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 50.0
    digits = Grammar(GrammarKind.REGEX, "[0-9]{1,2}")
    assert choose(logits, greedy(digits), output=b"1")[0] == [EOS]
    assert choose(logits, greedy(digits, min_tokens=9), output=b"1")[0] == [ord("0")]
    assert choose(logits, greedy(digits, ignore_eos=True), output=b"1")[0] == [ord("0")]
    assert choose(logits, greedy(digits, min_tokens=9, ignore_eos=True), output=b"12")[0] == [EOS]


def test_log_probabilities_are_those_of_the_model_without_the_grammar() -> None:
    yes = Grammar(GrammarKind.CHOICE, '["yes"]')
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    states = SlotStates(SlotShape(1, 64, VOCAB, (EOS,), torch.device("cpu")), byte_compiler())
    states.open(SlotOpened(0, greedy(yes, logprobs=3), 7, b"\1\0\0\0", 1))
    (row,) = sample(logits.clone(), np.array([0]), np.array([1]), states).rows([0])
    raw = logits[0].log_softmax(dim=-1)
    assert row.logprobs[0].chosen == pytest.approx(raw[ord("y")].item(), abs=1e-6)
    assert [token_id for token_id, _ in row.logprobs[0].top] == raw.topk(3).indices.tolist()


def test_a_row_that_cannot_go_on_fails_and_leaves_its_neighbours_alone() -> None:
    letters = GrammarCompiler(
        lambda: Vocabulary((b"a", b"<eos>"), frozenset({1}), (1,), lambda text: [0] * text.count("a"))
    )
    states = SlotStates(SlotShape(2, 8, 2, (1,), torch.device("cpu")), letters)
    stuck = Grammar(GrammarKind.REGEX, "ab")
    for slot, grammar in enumerate((stuck, None)):
        states.open(SlotOpened(slot, greedy(grammar), 0, np.array([0, 0], dtype="<i4").tobytes(), 1))
    sampled = sample(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), np.array([0, 1]), np.array([2, 2]), states)
    assert set(sampled.failures) == {0}
    first, second = sampled.rows([0, 1])
    assert first.failure is not None
    assert (second.token_ids, second.failure) == ((1,), None)


def test_a_slot_that_is_used_again_begins_its_own_grammar() -> None:
    states = SlotStates(SlotShape(1, 64, VOCAB, (EOS,), torch.device("cpu")), byte_compiler())
    logits, slots = torch.zeros(1, VOCAB), np.array([0])
    for text in ("no", "yes"):
        grammar = Grammar(GrammarKind.CHOICE, json.dumps([text]))
        states.open(SlotOpened(0, greedy(grammar), 0, b"\1\0\0\0", 1))
        for position, letter in enumerate(text, start=1):
            token_ids = sample(logits.clone(), slots, np.array([position]), states).token_ids
            assert token_ids.tolist() == [ord(letter)]
            states.append(slots, np.array([position]), token_ids)
            state = states.grammars.of(0)
            assert state is not None
            state.add(int(token_ids[0]))
        states.close(0)


def test_a_runner_that_was_made_without_a_compiler_says_so() -> None:
    states = SlotStates(SlotShape(1, 64, VOCAB, (EOS,), torch.device("cpu")))
    states.open(SlotOpened(0, greedy(NUMBERS), 0, b"\1\0\0\0", 1))
    with pytest.raises(EngineError, match="without a compiler"):
        sample(torch.zeros(1, VOCAB), np.array([0]), np.array([1]), states)
