"""Rotary position embedding (RoFormer, arXiv:2104.09864), heads split into halves as the published weights expect.

Owns: the frequencies of each kind of scaling, cosines and sines of a step's positions, the rotation.
Does not know: sequences: positions come with the step.
Next on the path: `engine/models/decoder.py`.
"""

from __future__ import annotations

import math
from typing import assert_never

import torch

from busllm.engine.models.rope_config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)


class Rope:
    """Rotates queries and keys by their positions."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self._attention_factor = attention_factor(config)
        self._frequencies = frequencies(config).to(device)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, computed once per step and shared by all layers.

        Args:
            positions: (num_tokens,), any integer type.

        Returns:
            Two float32 tensors (num_tokens, 1, head_dim / 2); the middle dimension spreads over heads.
        """
        turned = positions.to(torch.float32)[:, None] * self._frequencies  # (num_tokens, head_dim / 2)
        return (
            (turned.cos() * self._attention_factor)[:, None],
            (turned.sin() * self._attention_factor)[:, None],
        )


def rotate(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotates each pair (i, i + head_dim / 2) by its angle, in float32.

    Args:
        states: (num_tokens, num_heads, head_dim).
        cosines, sines: from `Rope.angles`.

    Returns:
        Same shape and dtype as `states`.
    """
    low, high = states.float().chunk(2, dim=-1)  # each (num_tokens, num_heads, head_dim / 2)
    rotated = torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)
    return rotated.to(states.dtype)


def attention_factor(config: RopeConfig) -> float:
    """What cosines and sines are multiplied by."""
    match config.scaling:
        case YarnScaling(attention_factor=factor) | LongRopeScaling(attention_factor=factor):
            return factor
        case LinearScaling() | Llama3Scaling() | None:
            return 1.0
        case _ as never:
            assert_never(never)


def frequencies(config: RopeConfig) -> torch.Tensor:
    """Angle per position of each pair of dimensions: float32 (head_dim / 2,)."""
    dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    plain = 1.0 / config.theta ** (dims / config.head_dim)
    match config.scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, config, scaling)
        case LongRopeScaling(factors=factors):
            return plain / torch.tensor(factors, dtype=torch.float32)
        case _ as never:
            assert_never(never)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_context_tokens * plain / (2 * math.pi)  # within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 0: stretched, 1: as trained
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: torch.Tensor, config: RopeConfig, scaling: YarnScaling) -> torch.Tensor:
    def dimension_of(num_turns: float) -> float:
        """The (fractional) dimension that turns that often within the original context."""
        turns_of_first = scaling.original_context_tokens / (num_turns * 2 * math.pi)
        return config.head_dim * math.log(turns_of_first) / (2 * math.log(config.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    if low == high:
        high += 0.001  # the ramp needs a width
    ramp = (torch.arange(config.head_dim // 2, dtype=torch.float32) - low) / (high - low)
    stretched = ramp.clamp(0.0, 1.0)  # 1: stretched, 0: as trained
    return stretched * plain / scaling.factor + (1 - stretched) * plain
