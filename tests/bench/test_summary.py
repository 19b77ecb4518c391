"""Medians, ratios and goals of a comparison."""

from __future__ import annotations

import pytest

from bench.compare.rows import Figure, Goal
from bench.compare.summary import (
    Line,
    Outcome,
    Spread,
    lines_of,
    noisy_visits,
    outcome_of,
    quotient,
    verdicts_of,
)
from tests.bench.made import KEYS, made


def line(key: str, figure: Figure) -> Line:
    return next(one for one in lines_of(made()) if (one.row.key, one.figure) == (key, figure))


@pytest.mark.parametrize(
    ("values", "median", "least", "most"),
    [((3.0, 1.0, 2.0), 2.0, 1.0, 3.0), ((4.0, 1.0), 2.5, 1.0, 4.0), ((7.0,), 7.0, 7.0, 7.0)],
)
def test_a_spread_is_the_median_and_the_outermost_rounds(
    values: tuple[float, ...], median: float, least: float, most: float
) -> None:
    spread = Spread(values)
    assert (spread.median, spread.least, spread.most) == (median, least, most)


def test_a_ratio_is_that_of_medians_and_not_the_median_of_ratios() -> None:
    assert quotient(Spread((10.0, 20.0, 60.0)), Spread((5.0, 1.0, 10.0))) == 4.0
    assert quotient(None, Spread((1.0,))) is None
    assert quotient(Spread((1.0,)), Spread((0.0,))) is None


def test_every_figure_of_a_measured_row_has_a_line_with_all_rounds_of_each_server() -> None:
    lines = lines_of(made())
    assert list(dict.fromkeys(one.row.key for one in lines)) == list(KEYS)
    output = line("c1", Figure.OUTPUT)
    assert output.spreads["busllm-auto"].values == (250.0, 300.0, 350.0)
    assert output.spreads["vllm"].values == (100.0, 100.0)  # the third time it did not start
    assert output.ratio("busllm-auto", "vllm") == 3.0


def test_a_server_without_a_figure_is_left_out_and_the_reason_is_told() -> None:
    arriving = line("arriving", Figure.STREAMS_P99)
    assert "llama" not in arriving.spreads
    assert arriving.notes == {"llama": "needs a sequence of 4,096 tokens", "vllm": "it ended & said <why>"}
    assert arriving.ratio("busllm-auto", "llama") is None


@pytest.mark.parametrize(
    ("figure", "reached", "outcome"),
    [
        (Figure.OUTPUT, 1.4, Outcome.MISSED),
        (Figure.OUTPUT, 1.5, Outcome.REACHED),
        (Figure.OUTPUT, 2.0, Outcome.AIM_REACHED),
        (Figure.TTFT_P50, 1.6, Outcome.MISSED),
        (Figure.TTFT_P50, 1.5, Outcome.REACHED),
    ],
)
def test_more_is_better_for_rates_and_less_for_times(figure: Figure, reached: float, outcome: Outcome) -> None:
    goal = Goal(figure, 1.5, 2.0 if figure.more_is_better else 1.0)
    assert outcome_of(goal, reached) is outcome


def test_a_goal_is_held_against_a_peer_or_another_row_or_stands_alone() -> None:
    comparison = made()
    found = {
        (one.row.key, one.goal.figure, one.against): (round(one.reached, 3), one.outcome)
        for one in verdicts_of(comparison, lines_of(comparison))
    }
    assert found == {
        ("start", Figure.START, None): (1.0, Outcome.AIM_REACHED),
        ("c1", Figure.OUTPUT, "llama"): (2.5, Outcome.AIM_REACHED),
        ("c1", Figure.TTFT_P50, "vllm"): (0.333, Outcome.AIM_REACHED),
        ("c8", Figure.OUTPUT, "vllm"): (3.0, Outcome.AIM_REACHED),
        ("c8-sampled", Figure.OUTPUT, "its own c8"): (0.95, Outcome.REACHED),
        ("arriving", Figure.STREAMS_P99, "vllm"): (0.333, Outcome.REACHED),
    }


def test_measurements_beside_other_work_are_named() -> None:
    assert all("c8-sampled: 0.50 cores" in text for text in noisy_visits(made()))
    assert len(noisy_visits(made())) == 8
