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
from busllm.model_store.config_values import ConfigValues


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
        ModelError: heads rotated in part, a kind of scaling that is not supported, or a value that is impossible.
    """
    config = ConfigValues(raw)
    settings = config.section_or_none("rope_parameters") or config.section_or_none("rope_scaling") or {}
    values = ConfigValues(settings)
    if settings.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("config.json rotates a part of each head (partial_rotary_factor); this decoder rotates all.")
    theta = (values if "rope_theta" in settings else config).real("rope_theta", default=10000.0)
    kind = settings.get("rope_type", settings.get("type", "default"))
    key = "original_max_position_embeddings"  # older configurations have it beside the rotary settings
    original = config.whole_or_none(key) or values.whole_or_none(key) or max_context_tokens
    scaling: RopeScaling | None
    match kind:
        case "default" | "dynamic":
            # Dynamic NTK scaling begins beyond max_position_embeddings, where the context that is served ends.
            scaling = None
        case "linear":
            scaling = LinearScaling(factor=values.real("factor"))
        case "llama3":
            scaling = _read_llama3(values, original)
        case "yarn":
            scaling = _read_yarn(values, theta, original, max_context_tokens)
        case "longrope" | "su":
            scaling = _read_longrope(values, head_dim, original, max_context_tokens)
        case _:
            known = "default, dynamic, linear, llama3, longrope, yarn"
            raise ModelError(f"rope scaling {kind!r} is not supported. Supported: {known}.")
    return RopeConfig(head_dim=head_dim, theta=theta, scaling=scaling)


def _read_llama3(values: ConfigValues, original: int) -> Llama3Scaling:
    low, high = values.real("low_freq_factor"), values.real("high_freq_factor")
    if high <= low:
        raise values.refusal("high_freq_factor", f"it must be over low_freq_factor ({low:g})")
    return Llama3Scaling(values.real("factor"), low, high, original_context_tokens=original)


def _read_longrope(values: ConfigValues, head_dim: int, original: int, max_context_tokens: int) -> LongRopeScaling:
    attention = values.real_or_none("attention_factor")
    if attention is None:
        factor = values.real_or_none("factor") or max_context_tokens / original
        attention = 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(values.reals("short_factor", head_dim // 2), attention)


def _read_yarn(values: ConfigValues, theta: float, original: int, max_context_tokens: int) -> YarnScaling:
    if theta <= 1:
        raise ModelError(f"config.json has rope_theta = {theta:g}; yarn needs one over 1.")
    factor = values.real_or_none("factor") or max_context_tokens / original
    attention = values.real_or_none("attention_factor")
    if attention is None:
        mscale = values.real_or_none("mscale", may_be_zero=True)
        of_all = values.real_or_none("mscale_all_dim", may_be_zero=True)
        scaled = mscale and of_all and _temperature(factor, mscale) / _temperature(factor, of_all)
        attention = scaled or _temperature(factor, 1.0)
    return YarnScaling(
        factor=factor,
        beta_fast=values.real_or_none("beta_fast") or 32.0,
        beta_slow=values.real_or_none("beta_slow") or 1.0,
        original_context_tokens=original,
        attention_factor=attention,
        truncate=values.flag("truncate", default=True),
    )


def _temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
