"""Attention backends by name.

Owns: which backends are built in, what "auto" stands for, and the look-up of others among installed plug-ins.
Does not know: how any of them works; only the one that is chosen is imported.
Next on the path: `engine/model_runner.py`.
"""

from __future__ import annotations

import importlib.util

import torch

from busllm.engine.attention.flashinfer_library import limit_of_kernels, load_flashinfer
from busllm.engine.attention.protocol import Attention, AttentionConfig, AttentionFactory
from busllm.engine.config import BUILT_IN_ATTENTIONS
from busllm.registry import load_plugin
from busllm.telemetry.logging import get_logger

AUTO = "auto"


def attention_factory(name: str) -> AttentionFactory:
    """Finds a backend.

    Args:
        name: one of `BUILT_IN_ATTENTIONS` but "cpu", or the name of a plug-in of the group `busllm.attention`.

    Raises:
        MissingPackage: no backend has that name, or its package is not complete.
    """
    match name:
        case "auto":
            return _automatic
        case "torch":
            from busllm.engine.attention.torch_attention import TorchAttention

            return TorchAttention
        case "flashinfer":
            load_flashinfer()  # now, and not when the weights have been loaded
            from busllm.engine.attention.flashinfer_attention import FlashInferAttention

            return FlashInferAttention
        case _:
            factory: AttentionFactory = load_plugin("busllm.attention", name, built_in=BUILT_IN_ATTENTIONS)
            return factory


def chosen_name(
    name: str, *, head_dim: int, dtype: torch.dtype, device: torch.device, has_sinks: bool
) -> tuple[str, str | None]:
    """What a name comes to for a model: FlashInfer on CUDA where it can serve it, else torch.

    Args:
        name: "auto" or a backend, which stays itself.
        head_dim, dtype, has_sinks: of the model's attention.
        device: where it is computed.

    Returns:
        The backend's name, and why it is not FlashInfer when that is a pity: on CUDA.
    """
    if name != AUTO:
        return name, None
    if device.type != "cuda":
        return "torch", None
    reason = limit_of_kernels(head_dim, dtype, has_sinks=has_sinks)
    if reason is None and importlib.util.find_spec("flashinfer") is None:
        reason = "the package is not installed; the extra busllm[cuda] brings it"
    return ("flashinfer", None) if reason is None else ("torch", reason)


def _automatic(config: AttentionConfig) -> Attention:
    name, reason = chosen_name(
        AUTO,
        head_dim=config.kv.head_dim,
        dtype=config.kv.dtype,
        device=config.kv.device,
        has_sinks=config.layer_sinks is not None,
    )
    if reason is not None:
        get_logger("busllm.attention").warning("slow_attention", backend=name, flashinfer=reason)
    return attention_factory(name)(config)
