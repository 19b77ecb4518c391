"""The router's choice and the way of rows to their experts: softmax and the largest shares, ties included."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from busllm.engine.cpu.kernels import prepare_kernels
from busllm.engine.cpu.shapes import Format, Mixture
from busllm.engine.models.config import ModelConfig, read_config

prepare_kernels()

from busllm.engine.cpu.experts import add_visits, choose_experts, send_rows  # noqa: E402
from busllm.engine.cpu.inputs import prepare_row, rows_beside  # noqa: E402
from busllm.engine.cpu.pack import aligned_zeros  # noqa: E402
from busllm.engine.cpu.step import note_visits  # noqa: E402
from busllm.engine.cpu.workspace import make_mixture, make_workspace  # noqa: E402
from tests.engine.cpu.pieces_of_rows import row_inputs  # noqa: E402
from tests.engine.cpu.weights import packed_matrix  # noqa: E402

Floats = npt.NDArray[np.float32]
HIDDEN = 64


def config(num_experts: int, each: int) -> ModelConfig:
    raw = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 32,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "num_experts": num_experts,
        "num_experts_per_tok": each,
        "moe_intermediate_size": 32,
    }
    return read_config(raw)


def choose(router: Floats, states: Floats, each: int, *, normalizes: bool = True) -> Mixture:
    mixture = make_mixture(config(len(router), each), len(states))
    weights, normed = aligned_zeros(router.shape, np.float32), aligned_zeros(states.shape, np.float32)
    weights[:], normed[:] = router, states
    choose_experts(weights, normalizes, normed, len(states), mixture)
    return mixture


def random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def visitors(mixture: Mixture) -> list[list[int]]:
    """The rows at each expert, in the order of their visits."""
    rows = {int(place): row for row, places in enumerate(mixture.places) for place in places}
    firsts = mixture.firsts.tolist()
    return [[rows[v] for v in range(first, end)] for first, end in pairwise(firsts)]


@pytest.mark.parametrize(("num_experts", "each"), [(5, 2), (5, 5), (16, 1), (17, 3), (128, 8)])
@pytest.mark.parametrize("normalizes", [True, False])
def test_the_largest_shares_are_chosen(num_experts: int, each: int, normalizes: bool) -> None:
    router, states = random(num_experts, HIDDEN), random(9, HIDDEN, seed=1) / 4
    mixture = choose(router, states, each, normalizes=normalizes)
    scores = states.astype(np.float64) @ router.T.astype(np.float64)
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    chosen = np.argsort(-shares, axis=1, kind="stable")[:, :each]
    expected = np.take_along_axis(shares, chosen, axis=1)
    if normalizes:
        expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(mixture.chosen, chosen)
    np.testing.assert_allclose(mixture.shares, expected, rtol=1e-5)


def test_of_equal_experts_those_with_the_smaller_numbers_are_chosen() -> None:
    router = np.zeros((20, HIDDEN), np.float32)
    router[[3, 7, 18]] = random(1, HIDDEN)
    states = np.stack([router[3], -router[3], np.zeros(HIDDEN, np.float32)])
    mixture = choose(router, states, 4)
    assert mixture.chosen.tolist() == [[3, 7, 18, 0], [0, 1, 2, 4], [0, 1, 2, 3]]
    np.testing.assert_allclose(mixture.shares[2], 0.25)


def test_each_row_visits_its_experts_once_and_experts_stand_in_order() -> None:
    mixture = choose(random(6, HIDDEN), random(11, HIDDEN, seed=1), 2)
    expected = [[row for row in range(11) if expert in mixture.chosen[row]] for expert in range(6)]
    assert visitors(mixture) == expected


def test_all_rows_at_one_expert_leave_the_others_without_any() -> None:
    router = random(6, HIDDEN)
    mixture = choose(router, np.repeat(router[4:5], 8, axis=0), 1)
    assert visitors(mixture) == [[], [], [], [], list(range(8)), []]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_choose_experts_that_exist_and_leave_other_rows_alone(bad: float) -> None:
    router, states = random(6, HIDDEN), random(5, HIDDEN, seed=1)
    expected = choose(router, states, 3)
    states[2, 5] = bad
    mixture = choose(router, states, 3)
    assert sorted(set(mixture.chosen[2].tolist())) == sorted(mixture.chosen[2].tolist())
    assert mixture.chosen.min() >= 0 and mixture.chosen.max() < 6
    assert not np.isfinite(mixture.shares[2]).all()
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(mixture.chosen[others], expected.chosen[others])
    np.testing.assert_array_equal(mixture.shares[others], expected.shares[others])


def test_a_row_chooses_the_same_bits_alone_and_in_a_batch() -> None:
    router, states = random(128, HIDDEN), random(9, HIDDEN, seed=1)
    together = choose(router, states, 8)
    for row in range(9):
        alone = choose(router, states[row : row + 1], 8)
        np.testing.assert_array_equal(alone.chosen[0], together.chosen[row])
        np.testing.assert_array_equal(alone.shares[0], together.shares[row])


def test_what_experts_that_change_nothing_give_back_is_the_row() -> None:
    shape, states = config(6, 2), random(7, HIDDEN, seed=1)
    space, mixture = make_workspace(shape, 7), choose(random(6, HIDDEN), states, 2)
    linear = packed_matrix(Format.INT8, 16, HIDDEN).linear
    send_rows(linear, states, 7, mixture.places, mixture.firsts, mixture.visits)
    for row in range(7):
        prepare_row(linear, space, row, 0, 7, states[row].ctypes.data)
        expected = row_inputs(space.inputs, Format.INT8, HIDDEN // 32, row, (0, 7))
        for visit in mixture.places[row]:
            beside = rows_beside(visit, mixture.firsts)
            sent = row_inputs(mixture.visits.inputs, Format.INT8, HIDDEN // 32, int(visit), beside)
            np.testing.assert_array_equal(sent.numbers, expected.numbers)
            mixture.visits.branch[visit] = states[row]
    add_visits(mixture, 7, space.branch)
    np.testing.assert_allclose(space.branch, states, rtol=1e-6)


def test_where_outliers_are_looked_for_the_first_token_is_left_out_wherever_its_visits_stand() -> None:
    """Its visits lie among those of all rows, in the order of the experts."""
    mixture = choose(random(5, HIDDEN), random(9, HIDDEN, seed=1), 2)
    space = make_workspace(config(5, 2), 9, keeps_peaks=True)
    gated = mixture.visits.gated
    gated[:] = 1.0
    for place in mixture.places[0]:
        gated[place, 3] = 100.0
    gated[mixture.places[4, 1], 7] = -50.0
    note_visits(space, 0, mixture, 9)
    peaks = space.peaks[0]
    assert (peaks[3], peaks[7]) == (1.0, 50.0)
