"""Rotary position embedding: which frequencies a configuration asks for.

Owns: `RopeConfig` and the reader of both spellings of `config.json` (`rope_theta` with `rope_scaling`, and the newer
`rope_parameters`).
Does not know: tensors.
Next on the path: `engine/layers/rope.py`, which computes the frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from busllm.errors import ModelError


class LinearScaling(msgspec.Struct, frozen=True, tag="linear"):
    """Positions are divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True, tag="llama3"):
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1).

    Attributes:
        factor: how far the longest waves are stretched.
        low_freq_factor, high_freq_factor: waves longer than original / low are stretched, shorter than
            original / high are kept.
        original_context_tokens: context of the pre-training.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


class YarnScaling(msgspec.Struct, frozen=True, tag="yarn"):
    """YaRN (arXiv:2309.00071): interpolation by frequency, and a temperature for the attention scores.

    Attributes:
        factor: how far slow dimensions are stretched.
        beta_fast, beta_slow: turns within the original context, above and below which a dimension is kept and
            stretched.
        original_context_tokens: context of the pre-training.
        attention_factor: multiplies cosines and sines.
        truncate: the borders of the blended dimensions are rounded outwards to whole ones.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_context_tokens: int
    attention_factor: float
    truncate: bool


class LongRopeScaling(msgspec.Struct, frozen=True, tag="longrope"):
    """LongRoPE (arXiv:2402.13753) within the context of the pre-training: a factor per frequency, and a temperature.

    Beyond that context the model has other factors, by which all earlier keys would have to be rotated again. So the
    context that is served ends there (`model_store/description.py`).

    Attributes:
        factors: head_dim / 2 numbers that the frequencies are divided by.
        attention_factor: multiplies cosines and sines.
    """

    factors: tuple[float, ...]
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding of whole heads.

    Attributes:
        head_dim: even.
        theta: base of the wave lengths.
        scaling: None = as trained.
    """

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None


def read_rope(raw: Mapping[str, Any], head_dim: int, max_context_tokens: int) -> RopeConfig:
    """Reads the rotary settings of a decoded `config.json`.

    Raises:
        ModelError: heads rotated in part, or a kind of scaling that is not supported.
    """
    settings: dict[str, Any] = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if settings.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("config.json rotates a part of each head (partial_rotary_factor); this decoder rotates all.")
    theta = float(settings.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = settings.get("rope_type", settings.get("type", "default"))
    original = _original_context_tokens(raw, settings, max_context_tokens)
    scaling: RopeScaling | None
    match kind:
        case "default" | "dynamic":
            # Dynamic NTK scaling begins beyond max_position_embeddings, where the context that is served ends.
            scaling = None
        case "linear":
            scaling = LinearScaling(factor=float(settings["factor"]))
        case "llama3":
            scaling = Llama3Scaling(
                factor=float(settings["factor"]),
                low_freq_factor=float(settings["low_freq_factor"]),
                high_freq_factor=float(settings["high_freq_factor"]),
                original_context_tokens=original,
            )
        case "yarn":
            scaling = _read_yarn(settings, original, max_context_tokens)
        case "longrope" | "su":
            scaling = _read_longrope(settings, head_dim, original, max_context_tokens)
        case _:
            known = "default, dynamic, linear, llama3, longrope, yarn"
            raise ModelError(f"rope scaling {kind!r} is not supported. Supported: {known}.")
    return RopeConfig(head_dim=head_dim, theta=theta, scaling=scaling)


def _original_context_tokens(raw: Mapping[str, Any], settings: Mapping[str, Any], max_context_tokens: int) -> int:
    """The context of the pre-training; older configurations have it beside the rotary settings."""
    key = "original_max_position_embeddings"
    return int(raw.get(key) or settings.get(key) or max_context_tokens)


def _read_longrope(
    settings: Mapping[str, Any], head_dim: int, original: int, max_context_tokens: int
) -> LongRopeScaling:
    factors = settings.get("short_factor")
    if not isinstance(factors, list) or len(factors) != head_dim // 2:
        raise ModelError(f"config.json needs {head_dim // 2} numbers in short_factor to scale its rope by longrope.")
    attention = settings.get("attention_factor")
    if attention is None:
        factor = float(settings.get("factor") or max_context_tokens / original)
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(tuple(float(number) for number in factors), float(attention))


def _read_yarn(settings: Mapping[str, Any], original: int, max_context_tokens: int) -> YarnScaling:
    factor = float(settings.get("factor") or max_context_tokens / original)
    if settings.get("mscale") and settings.get("mscale_all_dim") and settings.get("attention_factor") is None:
        attention = _temperature(factor, settings["mscale"]) / _temperature(factor, settings["mscale_all_dim"])
    else:
        attention = settings.get("attention_factor") or _temperature(factor, 1.0)
    return YarnScaling(
        factor=factor,
        beta_fast=float(settings.get("beta_fast") or 32),
        beta_slow=float(settings.get("beta_slow") or 1),
        original_context_tokens=original,
        attention_factor=float(attention),
        truncate=bool(settings.get("truncate", True)),
    )


def _temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
