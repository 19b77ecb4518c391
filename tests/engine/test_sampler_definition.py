"""The sampler is its definition: every setting at once, at random and at the extremes, alone and in a batch."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from busllm.engine.rng import uniform
from busllm.engine.sampler import sample
from busllm.engine.slot_states import SlotShape, SlotStates
from busllm.grammar.compiler import GrammarCompiler
from busllm.grammar.vocabulary import Vocabulary
from busllm.plan import SampledRow, SlotOpened
from busllm.sampling import Grammar, GrammarKind, SamplingParams
from tests.engine.sampler_definition import distribution, logprobs

VOCAB = 60
EOS = (3, 4)
LETTERS = "".join(chr(code) for code in range(ord("A"), ord("A") + VOCAB))
COMPILER = GrammarCompiler(
    lambda: Vocabulary(
        tuple(letter.encode() for letter in LETTERS), frozenset(EOS), EOS, lambda text: list(map(LETTERS.index, text))
    )
)


class Case:
    """One row: logits, tokens so far and settings, all of them numbers that float32 holds and adds exactly."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.seed = seed
        scale = source.choice([0.25, 1, 4])
        self.logits = [round(source.gauss(0, 2) * 64) * scale / 64 for _ in range(VOCAB)]
        self.prompt = [source.randrange(VOCAB) for _ in range(source.randrange(1, 9))]
        self.output = [source.randrange(5, VOCAB) for _ in range(source.randrange(9))]
        self.first = source.sample(range(5, VOCAB), 12) if source.random() < 0.3 and not self.output else None
        self.params = SamplingParams(
            temperature=source.choice([0.0, 1e-6, 0.5, 1.0, 2.0]),
            top_p=source.choice([0.0, 1e-9, 0.5, 0.9, 1.0, 1.0]),
            top_k=source.choice([None, None, 1, 5, VOCAB, 10**6]),
            min_p=source.choice([0.0, 0.0, 0.05, 1.0]),
            presence_penalty=source.choice([0, 0, 0.5, 2, -2]),
            frequency_penalty=source.choice([0, 0, 0.25, 2, -2]),
            repetition_penalty=source.choice([1, 1, 0.5, 2, 4]),
            logit_bias=tuple(
                (source.randrange(VOCAB), source.choice([-100.0, -1.5, 2.0, 100.0]))
                for _ in range(source.choice([0, 0, 1, 4]))
            ),
            min_tokens=source.choice([0, 0, 4, 20]),
            stop_token_ids=source.choice([(), (), (7, 8)]),
            ignore_eos=source.random() < 0.2,
            logprobs=source.choice([None, 0, 3, 20]),
            grammar=None if self.first is None else self._grammar(self.first),
        )

    @staticmethod
    def _grammar(first: list[int]) -> Grammar:
        return Grammar(GrammarKind.CHOICE, json.dumps([LETTERS[token_id] + "A" for token_id in first]))

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    def expected(self) -> list[float]:
        allowed = None if self.first is None else [token_id in self.first for token_id in range(VOCAB)]
        return distribution(self.logits, self.prompt, self.output, self.params, EOS, allowed)


def run(cases: list[Case]) -> list[SampledRow]:
    states = SlotStates(SlotShape(len(cases), 64, VOCAB, EOS, torch.device("cpu")), COMPILER)
    for slot, case in enumerate(cases):
        known = np.array(case.prompt + case.output, dtype="<i4").tobytes()
        states.open(SlotOpened(slot, case.params, case.seed, known, len(case.prompt)))
    slots, positions = np.arange(len(cases)), np.array([case.position for case in cases])
    logits = torch.tensor([case.logits for case in cases], dtype=torch.float32)
    return list(sample(logits, slots, positions, states).rows(slots.tolist()))


def values_of(row: SampledRow) -> tuple[object, ...]:
    return row.token_ids, row.logprobs, row.failure


@pytest.mark.parametrize("seed", range(0, 600, 100))
def test_a_token_is_the_inverse_of_the_cumulated_definition(seed: int) -> None:
    cases = [Case(number) for number in range(seed, seed + 100)]
    for case, row in zip(cases, run(cases), strict=True):
        expected, (token_id,) = case.expected(), row.token_ids
        number = float(uniform(np.array([case.seed], dtype=np.uint64), np.array([case.position]))[0])
        below = sum(expected[:token_id])
        assert expected[token_id] > 0, case.params
        if case.params.temperature > 0:
            assert below - 1e-9 <= number <= below + expected[token_id] + 1e-9, case.params


@pytest.mark.parametrize("seed", range(0, 200, 100))
def test_log_probabilities_are_those_of_the_model_before_any_setting(seed: int) -> None:
    cases = [Case(number) for number in range(seed, seed + 100)]
    for case, row in zip(cases, run(cases), strict=True):
        if case.params.logprobs is None:
            assert row.logprobs == ()
            continue
        expected, (entry,) = logprobs(case.logits), row.logprobs
        assert entry.chosen == pytest.approx(expected[row.token_ids[0]], abs=1e-5)
        assert len(entry.top) == case.params.logprobs
        best = sorted(expected, reverse=True)[: case.params.logprobs]
        assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-5)
        assert [expected[token_id] for token_id, _ in entry.top] == pytest.approx(best, abs=1e-5)


def test_a_row_is_the_same_to_the_bit_alone_and_in_any_batch() -> None:
    cases = [Case(number) for number in range(120)]
    alone = [run([case])[0] for case in cases]
    for num_rows in (2, 7, 30, 120):
        order = random.Random(num_rows).sample(range(len(cases)), len(cases))
        for first in range(0, len(cases), num_rows):
            chosen = order[first : first + num_rows]
            together = run([cases[number] for number in chosen])
            assert list(map(values_of, together)) == [values_of(alone[number]) for number in chosen]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.5, top_p=0.8, frequency_penalty=0.5, presence_penalty=-1.0),
        SamplingParams(top_k=6, min_p=0.1, repetition_penalty=2.0, logit_bias=((9, 2.0),)),
        SamplingParams(grammar=Grammar(GrammarKind.CHOICE, '["HA", "IA", "JA", "K"]')),
    ],
)
def test_frequencies_of_many_tokens_fit_the_definition(params: SamplingParams) -> None:
    num_draws = 4_000
    case = Case(11)
    case.params, case.output = params, [] if params.grammar else [9, 9, 12]
    case.first = [LETTERS.index(letter) for letter in "HIJK"] if params.grammar else None
    known = np.array(case.prompt + case.output, dtype="<i4").tobytes()
    states = SlotStates(SlotShape(num_draws, 64, VOCAB, EOS, torch.device("cpu")), COMPILER)
    for slot in range(num_draws):
        states.open(SlotOpened(slot, params, slot, known, len(case.prompt)))
    slots, positions = np.arange(num_draws), np.full(num_draws, case.position)
    logits = torch.tensor([case.logits], dtype=torch.float32).repeat(num_draws, 1)
    counts = np.bincount(sample(logits, slots, positions, states).token_ids.numpy(), minlength=VOCAB)
    expected = np.array(case.expected()) * num_draws
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    chi_square = ((counts[often] - expected[often]) ** 2 / expected[often]).sum()
    freedom = often.sum() - 1
    # The 99.99th percentile of chi-square, by the approximation of Wilson and Hilferty.
    assert chi_square <= freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
