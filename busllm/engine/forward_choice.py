"""Which forward pass serves a model.

Owns: the one choice between the compiled pass for CPUs and the torch modules, and what "auto" stands for.
Does not know: how either works; imports neither.
Next on the path: `engine/loader.py`.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

from busllm.engine.models.config import ModelConfig
from busllm.errors import ConfigError, ModelError
from busllm.telemetry.logging import get_logger

AUTO = "auto"
CPU = "cpu"

Quantization = Literal["auto", "none", "int8", "int4"]


class ForwardPass(Enum):
    """The forward passes."""

    TORCH = "torch"
    COMPILED = "cpu"


class ForwardWish(msgspec.Struct, frozen=True, kw_only=True):
    """What the choice depends on.

    Attributes:
        attention: as configured: "auto", "cpu", or the name of an attention backend of the torch modules.
        quantization: as configured.
        dtype: as configured.
        device: type of the device: "cpu" or "cuda".
        num_ranks: among which the model is split.
    """

    attention: str
    quantization: Quantization
    dtype: str
    device: str
    num_ranks: int


def choose_forward(wish: ForwardWish, model: ModelConfig | None) -> ForwardPass:
    """Chooses; "auto" takes the compiled pass where it can serve the model.

    Args:
        wish: what is asked for.
        model: the model's shape; None = it is not one of the supported families.

    Raises:
        ModelError: the compiled pass is asked for and cannot serve the model here.
        ConfigError: quantised weights are asked for where only the compiled pass has them.
    """
    if wish.attention not in (AUTO, CPU):
        reason: str | None = f"scheduler.attention is {wish.attention!r}"
    else:
        reason = _hindrance(wish, model)
    if reason is None:
        return ForwardPass.COMPILED
    if wish.attention == CPU:
        raise ModelError(f"The compiled forward pass cannot serve this: {reason}. Use attention = 'auto'.")
    if wish.quantization in ("int8", "int4"):
        raise ConfigError(
            f"is {wish.quantization!r}, which only the compiled forward pass for CPUs has, and it cannot serve this: "
            f"{reason}. Use 'auto'.",
            key="model.quantization",
        )
    if wish.attention == AUTO and wish.device == "cpu":
        get_logger("busllm.engine").info("torch_forward", reason=reason)
    return ForwardPass.TORCH


def _hindrance(wish: ForwardWish, model: ModelConfig | None) -> str | None:
    """Why the compiled pass cannot be used; None = it can."""
    if wish.device != "cpu":
        return f"the device is {wish.device!r}"
    if wish.dtype != AUTO:
        return f"model.dtype is {wish.dtype!r}, and it computes in float32 with a cache in bfloat16 ('auto')"
    if model is None:
        return "its architecture has no compiled pass"
    if model.experts is not None:
        return "it has experts"
    if wish.num_ranks > 1:
        return f"it is split among {wish.num_ranks} ranks"
    # On CUDA nobody asks, and what the question is put to need not be installed there.
    from busllm.engine.cpu.instructions import detect_instructions

    if detect_instructions() is None:
        return "this CPU has neither AVX2 with FMA and F16C nor NEON"
    return None
