"""Norms, rotation and activation of single rows, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from busllm.engine.cpu.kernels import prepare_kernels

prepare_kernels()

from busllm.engine.cpu import elementwise  # noqa: E402

SOURCE = np.random.default_rng(4)


def row(size: int, spread: float = 1.0) -> np.ndarray:
    return SOURCE.standard_normal(size, np.float32) * np.float32(spread)


def test_the_norm_divides_by_the_root_of_the_mean_square() -> None:
    states, weights, out = np.zeros(64, np.float32), np.zeros(64, np.float32), np.full(64, 7, np.float32)
    states[:50], weights[:50] = row(50, 30), row(50)
    elementwise.normalise_row(states.ctypes.data, weights.ctypes.data, out.ctypes.data, 50, 1e-5)
    wide = states.astype(np.float64)
    expected = wide / np.sqrt((wide**2).sum() / 50 + 1e-5) * weights
    np.testing.assert_allclose(out[:50], expected[:50], rtol=1e-5, atol=1e-6)
    assert not out[50:].any()


@pytest.mark.parametrize("size", [16, 20, 64, 128])
def test_the_norm_of_a_head_is_the_same(size: int) -> None:
    head, weights = row(size, 5), row(size)
    expected = head / np.sqrt((head.astype(np.float64) ** 2).mean() + 1e-6) * weights
    elementwise.normalise_head(head, weights, 1e-6)
    np.testing.assert_allclose(head, expected, rtol=1e-5, atol=1e-6)


def test_the_activation_is_silu_of_the_gate_times_up() -> None:
    gated = row(64, 20)
    gated[:3] = (-200.0, 200.0, 0.0)
    gate, up = gated[:32].astype(np.float64), gated[32:].astype(np.float64)
    elementwise.gate_row(gated.ctypes.data, 32)
    np.testing.assert_allclose(gated[:32], gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-30)


def test_a_head_turns_by_its_angles() -> None:
    head, angles = row(20), np.linspace(0, 3, 10, dtype=np.float32)
    low, high = head[:10].copy(), head[10:].copy()
    cosines, sines = np.cos(angles), np.sin(angles)
    elementwise.rotate_head(head, cosines, sines)
    np.testing.assert_allclose(head[:10], low * cosines - high * sines, atol=1e-6)
    np.testing.assert_allclose(head[10:], high * cosines + low * sines, atol=1e-6)


def test_a_row_of_zeros_and_no_epsilon_give_nan_and_no_error() -> None:
    """An error would end the share of a thread that has other rows in it."""
    zeros, weights, out = np.zeros(32, np.float32), np.ones(32, np.float32), np.zeros(32, np.float32)
    elementwise.normalise_row(zeros.ctypes.data, weights.ctypes.data, out.ctypes.data, 32, 0.0)
    assert np.isnan(out).all()
    head = np.zeros(16, np.float32)
    elementwise.normalise_head(head, weights[:16], 0.0)
    assert np.isnan(head).all()
