"""Numbers by seed and position."""

from __future__ import annotations

import numpy as np

from busllm.engine.rng import uniform
from busllm.sampling import mix64


def test_a_number_is_the_mixed_counter_of_the_mixed_seed() -> None:
    golden = 0x9E3779B97F4A7C15
    for seed, position in [(0, 0), (1, 7), (2**64 - 1, 131_071), (12345, 1)]:
        bits = mix64((mix64(seed) + position * golden) % 2**64)
        (number,) = uniform(np.array([seed], dtype=np.uint64), np.array([position]))
        assert number == (bits >> 11) * 2.0**-53


def test_numbers_do_not_depend_on_the_company() -> None:
    seeds = np.arange(50, dtype=np.uint64) * np.uint64(977)
    positions = np.arange(50)[::-1].copy()
    together = uniform(seeds, positions)
    assert together.tolist() == [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(50)]


def test_numbers_fill_the_unit_interval_evenly_along_positions_and_along_seeds() -> None:
    count = 100_000
    along_positions = uniform(np.full(count, 5, dtype=np.uint64), np.arange(count))
    along_seeds = uniform(np.arange(count, dtype=np.uint64), np.full(count, 5))
    for numbers in (along_positions, along_seeds):
        assert numbers.min() >= 0 and numbers.max() < 1
        cells = np.histogram(numbers, bins=64, range=(0, 1))[0]
        chi_square = ((cells - count / 64) ** 2 / (count / 64)).sum()
        assert chi_square < 63 + 4 * np.sqrt(2 * 63)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.015
