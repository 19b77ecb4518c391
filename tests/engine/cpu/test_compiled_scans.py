"""The compiled scans of rows against the readable ones: the same tokens, whatever the rows and settings are."""

from __future__ import annotations

import math

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from busllm.engine.cpu.kernels import prepare_kernels
from busllm.engine.draw import DrawSettings, draw

prepare_kernels()

from busllm.engine.compiled_scans import CompiledScans  # noqa: E402
from busllm.engine.compiled_weights import exponential  # noqa: E402

SCANS = CompiledScans()
NONE = 10**9
LARGEST_UNIFORM = 1 - 2.0**-53
Row = tuple[float, int, float, float, float]

rows_settings = st.tuples(
    st.sampled_from([1e-300, 1e-8, 1e-3, 0.3, 0.8, 1.0, 2.0, 100.0, 1e30]),
    st.sampled_from([1, 2, 50, 400, 2500, NONE]),
    st.sampled_from([0.0, 1e-9, 0.5, 0.9, 0.95, 0.999, 1 - 2.0**-53, 1.0]),
    st.sampled_from([0.0, 1e-300, 0.01, 0.5, 1.0]),
    st.floats(0, 1, exclude_max=True),
)


def stacked(rows: list[Row], vocab_size: int) -> DrawSettings:
    temperature, top_k, top_p, min_p, uniform = (np.array(column) for column in zip(*rows, strict=True))
    return DrawSettings(temperature, np.minimum(top_k, vocab_size), top_p, min_p, uniform)


def logits_of_kind(kind: str, num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    match kind:
        case "ties":
            return logits.round()
        case "flat":
            return torch.full_like(logits, -7.25)
        case "one-hot":
            logits[:] = -50.0
            logits[:, seed % vocab_size] = 50.0
        case "masked":
            logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.97] = -torch.inf
            logits[:, seed % vocab_size] = 1.0
        case "impossible":
            logits[:, seed % vocab_size + 1 :] = torch.finfo(torch.float32).min
        case "wide":
            logits *= 40
    return logits


@settings(max_examples=300, deadline=None)
@given(
    st.lists(rows_settings, min_size=1, max_size=6),
    st.integers(0, 10**6),
    st.sampled_from([1, 7, 16, 300, 3000]),
    st.sampled_from(["normal", "ties", "flat", "one-hot", "masked", "impossible", "wide"]),
)
def test_a_compiled_draw_gives_the_token_of_the_readable_one(
    rows: list[Row], seed: int, vocab_size: int, kind: str
) -> None:
    logits, own = logits_of_kind(kind, len(rows), vocab_size, seed), stacked(rows, vocab_size)
    assert SCANS.draw(logits, own).tolist() == draw(logits, own).tolist()


@pytest.mark.parametrize("spread", [0.5, 2.0, 5.0])
@pytest.mark.parametrize(
    "filters",
    [
        (0.8, NONE, 0.95, 0.0),
        (1.0, NONE, 1.0, 0.0),
        (0.8, 50, 0.9, 0.0),
        (1.0, NONE, 0.999, 0.01),
        (100, NONE, 0.999, 0),
    ],
)
def test_whole_vocabularies_give_the_same_tokens(filters: tuple[float, int, float, float], spread: float) -> None:
    source = np.random.default_rng(7)
    logits = torch.from_numpy(source.standard_normal((8, 49_157), np.float32) * np.float32(spread))
    numbers = [*source.random(6), 0.0, LARGEST_UNIFORM]
    own = stacked([(*filters, float(number)) for number in numbers], logits.shape[1])
    assert SCANS.draw(logits, own).tolist() == draw(logits, own).tolist()


def test_a_row_is_drawn_alone_on_one_core_as_beside_others_on_all() -> None:
    source = np.random.default_rng(3)
    logits = torch.from_numpy(source.standard_normal((9, 5000), np.float32) * np.float32(3))
    rows = [(0.8, NONE, 0.95, 0.0, float(number)) for number in source.random(9)]
    together = SCANS.draw(logits, stacked(rows, 5000)).tolist()
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    alone = [SCANS.draw(logits[i : i + 1], stacked(rows[i : i + 1], 5000)).item() for i in range(9)]
    assert together == alone == SCANS.draw(logits, stacked(rows, 5000)).tolist()
    numba.set_num_threads(threads)


@numba.njit
def exponentials(x):  # type: ignore[no-untyped-def]
    out = np.empty_like(x)
    for index in range(len(x)):
        out[index] = exponential(x[index])
    return out


def test_the_exponential_is_off_by_a_unit_in_the_last_place_at_most() -> None:
    x = np.concatenate([-np.random.default_rng(1).random(20_000) * 700, -(2.0 ** np.arange(-60, 9))])
    expected = np.exp(x)
    assert (np.abs(exponentials(x) - expected) <= np.spacing(expected)).all()
    assert exponentials(np.array([0.0, -745.0, -800.0, -1e308, -math.inf])).tolist() == [1, math.exp(-745), 0, 0, 0]


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 50, 1000])
def test_the_most_likely_token_is_the_first_of_equals(vocab_size: int) -> None:
    logits = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).round()
    assert SCANS.most_likely(logits).tolist() == logits.argmax(dim=-1).tolist()
    assert SCANS.most_likely(torch.full((3, vocab_size), -3e38)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 40, 49])
def test_what_is_no_number_is_found_and_replaced_in_its_row(value: float, place: int) -> None:
    logits = torch.randn(3, 50)
    logits[1, place] = value
    expected = logits.nan_to_num(nan=-5.0, neginf=-5.0)
    assert SCANS.make_finite(logits, -5.0).tolist() == [True, value == -math.inf, True]
    assert torch.equal(logits, expected)
    assert SCANS.make_finite(torch.full((2, 50), -math.inf), -5.0).tolist() == [False, False]
