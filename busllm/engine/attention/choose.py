"""Attention backends by name.

Owns: which backends are built in, and the look-up of others among installed plug-ins.
Does not know: how any of them works; only the one that is named is imported.
Next on the path: `engine/model_runner.py`.
"""

from __future__ import annotations

from busllm.engine.attention.protocol import AttentionFactory
from busllm.registry import load_plugin

AUTO = "auto"
BUILT_IN = ("torch",)


def attention_factory(name: str) -> AttentionFactory:
    """Finds a backend.

    Args:
        name: "auto", one of `BUILT_IN`, or the name of a plug-in of the group `busllm.attention`.

    Raises:
        MissingPackage: no backend has that name, or its package is not complete.
    """
    if name in (AUTO, "torch"):
        from busllm.engine.attention.torch_attention import TorchAttention

        return TorchAttention
    factory: AttentionFactory = load_plugin("busllm.attention", name, built_in=BUILT_IN)
    return factory
