"""The place where a model of `transformers` calls its attention.

Owns: the function that is registered there, and the reading of what a layer hands to it.
Does not know: pages, sequences; what answers a call is set by `survey.py` or `hooked_model.py`.
Next on the path: `models/hooked/hooked_model.py`.

`transformers` knows attention functions by name only, one table per process. So one function is registered, and each
model carries its own `AttentionHook` on its modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from busllm.errors import ModelError

ATTENTION_NAME = "busllm"
EAGER = "eager"
_HOOK = "busllm_attention_hook"  # the attribute of each module


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asks for.

    Attributes:
        module: the layer's attention.
        queries: (num_tokens, num_heads, head_dim).
        keys: (num_tokens, num_kv_heads, head_dim).
        values: (num_tokens, num_kv_heads, value_dim).
        scale: multiplies the scores.
        window: how many positions a token sees, its own included; None = all.
        soft_cap: of the scores; None = none.
        sinks: (num_heads,); None = none.
    """

    module: torch.nn.Module
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None


Attend = Callable[[AttentionCall], torch.Tensor]  # → (num_tokens, num_heads, value_dim)


class AttentionHook:
    """One model's attention: the model's own, or whoever is told to answer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._attend: Attend | None = None
        AttentionInterface.register(ATTENTION_NAME, _answer)
        for module in model.modules():
            setattr(module, _HOOK, self)

    def use(self, attend: Attend | None) -> None:
        """Sets who answers; None = the model's own eager attention."""
        self._attend = attend
        self._model.config._attn_implementation = EAGER if attend is None else ATTENTION_NAME

    def answer(self, call: AttentionCall) -> torch.Tensor:
        """Answers one layer."""
        assert self._attend is not None  # with eager attention the model does not come here
        return self._attend(call)


def _answer(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Called by `transformers` with one flat sequence: query (1, num_heads, num_tokens, head_dim), key and value alike.

    Returns:
        (1, num_tokens, num_heads, value_dim) and no attention weights.

    Raises:
        ModelError: the layer asks for something that is not known here.
    """
    _refuse_unknown(module, attention_mask, others)
    hook: AttentionHook = getattr(module, _HOOK)
    call = AttentionCall(
        module=module,
        queries=query[0].transpose(0, 1),
        keys=key[0].transpose(0, 1),
        values=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=_window(sliding_window),
        soft_cap=None if softcap is None else float(softcap),
        sinks=s_aux,
    )
    return hook.answer(call)[None], None


# Tensors that say where tokens stand, which the step's rows say already.
_KNOWN_TENSORS = frozenset({"position_ids", "cache_position"})


def _refuse_unknown(module: torch.nn.Module, mask: torch.Tensor | None, others: dict[str, Any]) -> None:
    if mask is not None:
        raise ModelError("its attention has a mask of its own")
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ModelError("its attention looks ahead")
    for name, value in others.items():
        if isinstance(value, torch.Tensor) and name not in _KNOWN_TENSORS:
            raise ModelError(f"its attention is given {name!r}, which is not known here")


def _window(sliding_window: object) -> int | None:
    if sliding_window is None or (isinstance(sliding_window, int) and sliding_window > 0):
        return sliding_window
    raise ModelError(f"its attention has the window {sliding_window!r}")
