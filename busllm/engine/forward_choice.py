"""Which forward pass serves a model.

Owns: the one choice between the compiled pass for CPUs and the torch modules, and what "auto" stands for.
Does not know: how either works; imports neither.
Next on the path: `engine/loader.py`.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

from busllm.engine.config import COMPILED_PAGE_UNIT, cut_blocks
from busllm.engine.models.config import ModelConfig
from busllm.errors import ConfigError, ModelError

AUTO = "auto"
CPU = "cpu"

Quantization = Literal["auto", "none", "int8", "int4"]

_ROUNDED = ("float32", "float16")  # formats that the compiled pass does not keep: it has bfloat16 and blocks of ggml


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
        page_tokens: tokens per KV page, as configured; None = "auto".
        weights: number format of most weights in the files ("bfloat16", "q4_1", …); None = not looked at.
    """

    attention: str
    quantization: Quantization
    dtype: str
    device: str
    num_ranks: int
    page_tokens: int | None = None
    weights: str | None = None


def choose_forward(wish: ForwardWish, model: ModelConfig | None) -> ForwardPass:
    """Chooses; "auto" takes the compiled pass where it can serve the model without rounding what the files hold.

    Weights in float32 and float16 would be rounded to bfloat16. That is done when it is asked for, by
    `attention = "cpu"` or a quantization.

    Args:
        wish: what is asked for.
        model: the model's shape; None = it is not one of the supported families.

    Raises:
        ModelError: the compiled pass is asked for and cannot serve the model here.
        ConfigError: quantised weights are asked for where only the compiled pass has them; or its pages are asked to
            have another size than it can serve.
    """
    reason = why_not_compiled(wish, model)
    if reason is None:
        return ForwardPass.COMPILED
    if wish.attention == CPU:
        if _hindrance(wish, model) is None:
            raise ConfigError(cut_blocks(wish.page_tokens or 0), key="scheduler.page_tokens")
        raise ModelError(f"The compiled forward pass cannot serve this: {reason}. Use attention = 'auto'.")
    if wish.quantization in ("int8", "int4"):
        raise ConfigError(
            f"is {wish.quantization!r}, which only the compiled forward pass for CPUs has, and it cannot serve this: "
            f"{reason}. Use 'auto'.",
            key="model.quantization",
        )
    return ForwardPass.TORCH


def why_not_compiled(wish: ForwardWish, model: ModelConfig | None) -> str | None:
    """Why the compiled pass is not chosen, as a clause about it; None = it is. Arguments as `choose_forward`."""
    if wish.attention not in (AUTO, CPU):
        return f"scheduler.attention is {wish.attention!r}"
    hindrance = _hindrance(wish, model)
    if hindrance is not None:
        return hindrance
    if _cuts_blocks(wish):
        return f"scheduler.page_tokens is {wish.page_tokens}, and its pages are multiples of {COMPILED_PAGE_UNIT}"
    if wish.attention == AUTO and wish.quantization == AUTO and wish.weights in _ROUNDED:
        return (
            f"it would round weights that are stored in {wish.weights} to bfloat16; "
            "model.quantization = 'none' asks for that, and is faster"
        )
    return None


def _cuts_blocks(wish: ForwardWish) -> bool:
    return wish.page_tokens is not None and wish.page_tokens % COMPILED_PAGE_UNIT != 0


def _hindrance(wish: ForwardWish, model: ModelConfig | None) -> str | None:
    """Why the compiled pass cannot be used; None = it can."""
    if wish.device != "cpu":
        return f"the device is {wish.device!r}"
    if wish.dtype != AUTO:
        return f"model.dtype is {wish.dtype!r}, and it computes in float32 with a cache in bfloat16 ('auto')"
    if model is None:
        return "its architecture has no compiled pass"
    if wish.num_ranks > 1:
        return f"it is split among {wish.num_ranks} ranks"
    # On CUDA nobody asks, and what the question is put to need not be installed there.
    from busllm.engine.cpu.instructions import detect_instructions

    if detect_instructions() is None:
        return "this CPU has neither AVX2 with FMA and F16C nor NEON"
    return None
