"""Drawing: the definition in its plainest form, in numpy, with a full sort; and what must hold at the extremes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from busllm.engine.draw import DrawSettings, draw, draw_on_device
from busllm.engine.rng import uniform


def kept_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probability of each token, by the definition."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    weights = np.exp(scaled)
    order = sorted(range(len(weights)), key=lambda token_id: (-weights[token_id], token_id))[:top_k]
    if top_p < 1:
        share = np.cumsum(weights[order]) / sum(weights[order])
        order = order[: int(np.sum(share < top_p)) + 1]
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    kept[kept < min_p * weights.max()] = 0
    return kept / kept.sum()


def one_row(temperature: float = 1.0, top_k: int = 10**9, top_p: float = 1.0, min_p: float = 0.0, u: float = 0.5):  # type: ignore[no-untyped-def]
    return temperature, top_k, top_p, min_p, u


def stacked(rows: list[tuple[float, int, float, float, float]], vocab_size: int) -> DrawSettings:
    temperature, top_k, top_p, min_p, u = (np.array(column) for column in zip(*rows, strict=True))
    return DrawSettings(temperature, np.minimum(top_k, vocab_size), top_p, min_p, u)


def draw_rows(logits: torch.Tensor, rows: list[tuple[float, int, float, float, float]]) -> list[int]:
    """Draws in both ways, which must agree."""
    settings = stacked(rows, logits.shape[1])
    drawn = draw(logits, settings).tolist()
    assert draw_on_device(logits, settings).tolist() == drawn
    return drawn


settings_of_a_row = st.tuples(
    st.sampled_from([1e-6, 0.3, 0.8, 1.0, 2.0]),
    st.sampled_from([1, 2, 5, 63, 400, 1023, 1024, 1025, 2500, 10**9]),
    st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    st.floats(0, 1, exclude_max=True),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(settings_of_a_row, min_size=1, max_size=6),
    st.integers(0, 10**6),
    st.sampled_from([7, 300, 3000]),
    st.sampled_from([0.0, 1e-9, 0.01, 3.0, 30.0]),
)
def test_a_draw_is_the_inverse_of_the_cumulated_kept_distribution(
    rows: list[tuple[float, int, float, float, float]], seed: int, vocab_size: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocab_size, generator=generator) * spread
    if seed % 3 == 0:
        logits = logits.round()  # many equal probabilities
    for token_id, row, row_logits in zip(draw_rows(logits, rows), rows, logits.numpy(), strict=True):
        *filters, u = row
        expected = kept_distribution(row_logits, *filters)
        below = expected[:token_id].sum()
        assert expected[token_id] > 0
        assert below - 1e-9 <= u <= below + expected[token_id] + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.lists(settings_of_a_row, min_size=2, max_size=8), st.integers(0, 10**6))
def test_a_row_is_drawn_alone_as_beside_others(rows: list[tuple[float, int, float, float, float]], seed: int) -> None:
    logits = torch.randn(len(rows), 2000, generator=torch.Generator().manual_seed(seed))
    together = draw_rows(logits, rows)
    assert together == [draw_rows(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_frequencies_of_many_draws_fit_the_distribution(filters: dict[str, float]) -> None:
    num_draws = 20_000
    logits = torch.randn(20, generator=torch.Generator().manual_seed(3)) * 1.5
    seeds = np.full(num_draws, 42, dtype=np.uint64)
    numbers = uniform(seeds, np.arange(num_draws))
    rows = [one_row(**filters, u=u) for u in numbers]  # type: ignore[arg-type]
    drawn = draw_rows(logits.expand(num_draws, -1).contiguous(), rows)
    counts = np.bincount(drawn, minlength=20)
    temperature, top_k, top_p, min_p, _ = one_row(**filters)  # type: ignore[arg-type]
    expected = kept_distribution(logits.numpy(), temperature, top_k, top_p, min_p) * num_draws
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    # The 99.99th percentile of chi-square, by the approximation of Wilson and Hilferty.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert chi_square <= limit


@pytest.mark.parametrize("u", [0.0, 0.3, 0.999999])
@pytest.mark.parametrize("filters", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-6}])
def test_the_narrowest_settings_give_the_most_likely_token(filters: dict[str, float], u: float) -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(5))
    assert draw_rows(logits, [one_row(**filters, u=u)] * 4) == logits.argmax(dim=-1).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
def test_a_temperature_next_to_zero_is_finite(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert draw_rows(logits, [one_row(temperature=temperature, u=0.999)]) == [1]


def test_among_equals_the_smaller_id_is_kept() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0]])
    drawn = {draw_rows(logits, [one_row(top_k=2, u=u)])[0] for u in np.linspace(0, 0.999, 50)}
    assert drawn == {1, 2}


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    logits = torch.zeros(1, 4)
    drawn = {draw_rows(logits, [one_row(top_k=2**31 - 1, u=u)])[0] for u in np.linspace(0, 0.999, 50)}
    assert drawn == {0, 1, 2, 3}


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.999999}, {"top_k": 900}, {"min_p": 1e-300}])
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-53])
def test_what_is_impossible_is_never_drawn(filters: dict[str, float], u: float) -> None:
    logits = torch.full((3, 1000), -torch.inf)
    logits[:, [5, 700]] = 1.0
    logits[:, 701:] = torch.finfo(torch.float32).min
    assert set(draw_rows(logits, [one_row(**filters, u=u)] * 3)) <= {5, 700}  # type: ignore[arg-type]


def test_the_largest_uniform_number_draws_a_kept_token() -> None:
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(1))
    rows = [one_row(top_k=7, u=1 - 2.0**-53)] * 64
    for token_id, row in zip(draw_rows(logits, rows), logits, strict=True):
        assert token_id in row.topk(7).indices.tolist()


@pytest.mark.parametrize("vocab_size", [3, 277, 5000, 49152])
@pytest.mark.parametrize("below_one", [2.0**-53, 1e-15])
@pytest.mark.parametrize("top_k", [10**9, 2500])
def test_a_share_next_to_one_keeps_all_that_can_be_drawn(vocab_size: int, below_one: float, top_k: int) -> None:
    """Sums in another order differ by roundings: the wanted share may be more than all buckets reach."""
    generator = torch.Generator().manual_seed(vocab_size)
    for spread in (1.0, 3.0, 6.0):
        logits = torch.randn(6, vocab_size, generator=generator) * spread
        filters = {"top_p": 1 - below_one, "top_k": top_k, "min_p": 1e-300}
        rows = [one_row(**filters, u=u) for u in np.linspace(0.1, 0.9, len(logits))]  # type: ignore[arg-type]
        without = [one_row(top_k=top_k, u=row[-1]) for row in rows]
        assert draw_rows(logits, rows) == draw_rows(logits, without)
