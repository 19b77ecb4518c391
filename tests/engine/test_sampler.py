"""Choosing tokens: every setting does what its definition says, in its own row only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from busllm.engine.sampler import sample
from busllm.engine.slot_states import SlotShape, SlotStates
from busllm.plan import SlotOpened, TokenLogprobs
from busllm.sampling import SamplingParams

VOCAB = 50
EOS = (3, 4)
PROMPT = [10, 11, 10]
OUTPUT = [20, 21, 20, 20]


def states_of(*all_params: SamplingParams, seed: int = 9) -> SlotStates:
    states = SlotStates(SlotShape(len(all_params), 64, VOCAB, EOS, torch.device("cpu")))
    known = np.array(PROMPT + OUTPUT, dtype="<i4").tobytes()
    for slot, params in enumerate(all_params):
        states.open(SlotOpened(slot, params, seed, known, len(PROMPT)))
    return states


def choose(logits: torch.Tensor, *all_params: SamplingParams, seed: int = 9) -> list[int]:
    return chosen_with_logprobs(logits, *all_params, seed=seed)[0]


def chosen_with_logprobs(
    logits: torch.Tensor, *all_params: SamplingParams, seed: int = 9
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    rows = np.arange(len(all_params))
    positions = np.full(len(all_params), len(PROMPT) + len(OUTPUT))
    sampled = sample(logits.clone(), rows, positions, states_of(*all_params, seed=seed))
    entries = sampled.logprobs.collect() if sampled.logprobs is not None else []
    return sampled.token_ids.tolist(), dict(zip(sampled.logprob_rows, entries, strict=True))


def logits_with(**values: float) -> torch.Tensor:
    """One row of zeros, but for `t<id>=value`."""
    logits = torch.zeros(1, VOCAB)
    for name, value in values.items():
        logits[0, int(name[1:])] = value
    return logits


def greedy(**settings: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **settings)  # type: ignore[arg-type]


def test_temperature_zero_takes_the_most_likely_token_and_of_equals_the_first() -> None:
    assert choose(logits_with(t7=2.0, t9=2.0), greedy()) == [7]


@pytest.mark.parametrize(("presence", "winner"), [(0.9, 20), (1.1, 30)])
def test_the_presence_penalty_counts_a_generated_token_once(presence: float, winner: int) -> None:
    assert choose(logits_with(t20=3.0, t30=2.0), greedy(presence_penalty=presence)) == [winner]


@pytest.mark.parametrize(("frequency", "winner"), [(0.3, 20), (0.35, 30)])
def test_the_frequency_penalty_counts_each_occurrence(frequency: float, winner: int) -> None:
    assert choose(logits_with(t20=3.0, t30=2.0), greedy(frequency_penalty=frequency)) == [winner]


def test_presence_and_frequency_leave_the_prompt_alone() -> None:
    params = greedy(presence_penalty=2.0, frequency_penalty=2.0)
    assert choose(logits_with(t10=3.0, t30=2.0), params) == [10]


def test_a_negative_penalty_favours_what_was_said() -> None:
    assert choose(logits_with(t21=1.0, t30=2.0), greedy(presence_penalty=-1.5)) == [21]


@pytest.mark.parametrize("token", [10, 20])
def test_the_repetition_penalty_weakens_tokens_of_prompt_and_output(token: int) -> None:
    logits = logits_with(t30=2.0)
    logits[0, token] = 3.0
    assert choose(logits, greedy(repetition_penalty=1.4)) == [token]
    assert choose(logits, greedy(repetition_penalty=1.6)) == [30]


def test_the_repetition_penalty_makes_negative_logits_more_negative() -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 10], logits[0, 30] = -1.0, -1.5
    assert choose(logits, greedy(repetition_penalty=1.4)) == [10]
    assert choose(logits, greedy(repetition_penalty=1.6)) == [30]


def test_a_bias_of_100_decides_and_of_minus_100_forbids() -> None:
    assert choose(logits_with(t7=9.0), greedy(logit_bias=((12, 100.0),))) == [12]
    assert choose(logits_with(t7=9.0, t8=1.0), greedy(logit_bias=((7, -100.0),))) == [8]


def test_a_bias_is_added_for_each_entry() -> None:
    assert choose(logits_with(t7=3.0), greedy(logit_bias=((12, 2.0), (12, 2.0)))) == [12]


@pytest.mark.parametrize(("min_tokens", "winner"), [(4, 3), (5, 8)])
def test_an_end_is_impossible_before_min_tokens(min_tokens: int, winner: int) -> None:
    assert choose(logits_with(t3=9.0, t4=8.0, t5=7.0, t8=1.0), greedy(min_tokens=min_tokens, stop_token_ids=(5,))) == [
        winner
    ]


def test_a_vocabulary_of_nothing_but_ends_still_gives_a_token() -> None:
    params = SamplingParams(min_tokens=9, stop_token_ids=tuple(range(VOCAB)))
    assert 0 <= choose(torch.randn(1, VOCAB), params)[0] < VOCAB


def test_a_row_that_overflowed_gives_a_token_and_leaves_its_neighbour_alone() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = choose(logits, SamplingParams(), SamplingParams(logprobs=3))[1]
    logits[0] = torch.nan
    tokens, logprobs = chosen_with_logprobs(logits, SamplingParams(logprobs=3), SamplingParams(logprobs=3))
    assert tokens[1] == expected
    assert all(np.isfinite(entry.chosen) for entry in logprobs.values())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_with_a_value_that_is_no_number_is_told_apart(value: float) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 7], logits[2, 7] = value, -torch.inf  # a token that cannot come is no fault
    sampled = sample(logits, np.arange(3), np.array([7] * 3), states_of(greedy(), greedy(), greedy()))
    assert [row.is_finite for row in sampled.rows((0, 1, 2))] == [True, False, True]


def test_the_settings_of_a_row_do_not_reach_another() -> None:
    loud = [
        SamplingParams(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=3.0),
        SamplingParams(logit_bias=((30, 100.0),)),
        SamplingParams(min_tokens=20, stop_token_ids=(7,)),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.1),
        SamplingParams(min_p=0.9),
        SamplingParams(temperature=0.0, logprobs=20),
        SamplingParams(temperature=2.0, prompt_logprobs=3),
    ]
    quiet = [greedy(), SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9)]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    for params in quiet:
        (expected,) = choose(logits, params)
        for neighbour in loud:
            for together in ((params, neighbour), (neighbour, params)):
                both = choose(logits.expand(2, -1), *together)
                assert both[together.index(params)] == expected


def test_a_seed_decides_and_another_seed_decides_otherwise() -> None:
    logits = torch.zeros(1, VOCAB)
    draws = [choose(logits, SamplingParams(), seed=seed)[0] for seed in range(30)]
    assert draws == [choose(logits, SamplingParams(), seed=seed)[0] for seed in range(30)]
    assert len(set(draws)) > 10


def test_log_probabilities_are_those_before_any_setting() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    params = SamplingParams(
        temperature=0.3, top_k=2, logit_bias=((5, 50.0),), presence_penalty=1.0, logprobs=4, min_tokens=20
    )
    tokens, logprobs = chosen_with_logprobs(logits, params)
    raw = logits[0].log_softmax(dim=-1)
    assert tokens == [5]
    assert logprobs[0].chosen == pytest.approx(raw[5].item(), abs=1e-6)
    assert [token_id for token_id, _ in logprobs[0].top] == raw.topk(4).indices.tolist()
    assert [value for _, value in logprobs[0].top] == pytest.approx(raw.topk(4).values.tolist(), abs=1e-6)


def test_log_probabilities_go_to_the_rows_that_asked_and_with_the_count_they_asked_for() -> None:
    logits = torch.randn(4, VOCAB)
    all_params = greedy(), greedy(logprobs=0), greedy(logprobs=2), SamplingParams()
    _, logprobs = chosen_with_logprobs(logits, *all_params)
    assert {row: len(entry.top) for row, entry in logprobs.items()} == {1: 0, 2: 2}


def test_more_alternatives_than_the_vocabulary_gives_the_vocabulary() -> None:
    states = SlotStates(SlotShape(1, 8, 5, (), torch.device("cpu")))
    states.open(SlotOpened(0, greedy(logprobs=20), 0, b"\0\0\0\0", 1))
    sampled = sample(torch.randn(1, 5), np.array([0]), np.array([1]), states)
    assert sampled.logprobs is not None
    assert len(sampled.logprobs.collect()[0].top) == 5


def test_a_step_looks_at_no_entry_of_what_a_request_listed() -> None:
    """A thousand entries of every row in Python would take a step longer than the model does."""
    looked_at = []

    class Listed(tuple[Any, ...]):
        def __iter__(self) -> Iterator[Any]:
            looked_at.append(len(self))
            return super().__iter__()

    biases = Listed((token_id, 1.0) for token_id in range(20, VOCAB))
    params = greedy(logit_bias=biases, stop_token_ids=Listed(range(20)), min_tokens=60)
    states = states_of(params, params)
    looked_at.clear()
    for position in range(7, 20):
        sampled = sample(logits_with(t8=9.0, t30=2.0).repeat(2, 1), np.arange(2), np.array([position] * 2), states)
        assert sampled.token_ids.tolist() == [30, 30]
    assert looked_at == []
