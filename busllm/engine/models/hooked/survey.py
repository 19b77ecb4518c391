"""What a model's layers ask of attention, learned from one forward pass.

Owns: the check that each layer calls the hook once, and the `AttentionShape` that follows from the calls.
Does not know: whether the answers will be right (`self_test.py`).
Next on the path: `models/hooked/hooked_model.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from busllm.engine.models.hooked.hook import AttentionCall, AttentionHook
from busllm.engine.models.protocol import AttentionShape
from busllm.errors import ModelError

SURVEY_TOKENS = 5  # any number that no dimension of a model has by accident in its place
_KNOWN_LAYERS = {"full_attention": False, "sliding_attention": True}  # whether it has a window
_Value = TypeVar("_Value", bound=Hashable)


@dataclass(frozen=True)
class Survey:
    """What was learned.

    Attributes:
        shape: for the attention backend; `head_dim` is the widest head of keys or values.
        layers: attention module → index of its layer in the KV cache.
    """

    shape: AttentionShape
    layers: dict[torch.nn.Module, int]


def survey(config: Any, hook: AttentionHook, forward: Callable[[torch.Tensor, torch.Tensor], Any]) -> Survey:
    """Runs the model once over a few tokens.

    Args:
        config: of the text model, as `transformers` has it.
        hook: of the model.
        forward: runs all layers over token ids and positions, each int64 (num_tokens,).

    Raises:
        ModelError: the model cannot be served; the message is a clause about it ("it …").
    """
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return call.queries.new_zeros(*call.queries.shape[:2], call.values.shape[-1])

    hook.use(record)
    tokens = torch.arange(SURVEY_TOKENS)
    forward(tokens, tokens)
    _check_layers(calls, config.num_hidden_layers)
    windows = tuple(call.window for call in calls)
    _check_windows(config, windows)
    sinks = [call.sinks for call in calls if call.sinks is not None]
    if len(sinks) not in (0, len(calls)):
        raise ModelError("only some of its layers have attention sinks")
    shape = AttentionShape(
        num_layers=len(calls),
        num_heads=_same("attention heads", [call.queries.shape[1] for call in calls]),
        num_kv_heads=_same("key-value heads", [call.keys.shape[1] for call in calls]),
        head_dim=max(max(call.keys.shape[-1], call.values.shape[-1]) for call in calls),
        scale=calls[0].scale,
        layer_windows=windows,
        soft_cap=_same("soft caps", [call.soft_cap for call in calls]),
        layer_sinks=tuple(sink.detach().float() for sink in sinks) or None,
    )
    if shape.num_heads % shape.num_kv_heads:
        raise ModelError(f"{shape.num_heads} attention heads cannot share {shape.num_kv_heads} key-value heads evenly")
    return Survey(shape, {call.module: index for index, call in enumerate(calls)})


def _check_layers(calls: Sequence[AttentionCall], num_layers: int) -> None:
    if len(calls) != num_layers:
        raise ModelError(
            f"its attention was called through the interface {len(calls)} times, and it has {num_layers} layers"
        )
    if len({call.module for call in calls}) != num_layers:
        raise ModelError("a layer calls its attention more than once")
    for call in calls:
        if call.queries.shape[0] != SURVEY_TOKENS or call.keys.shape[0] != SURVEY_TOKENS:
            raise ModelError("its attention works on other tokens than it was given")


def _check_windows(config: Any, windows: Sequence[int | None]) -> None:
    """A window that stands in the configuration alone would be a mask of the model's own, which is not made here."""
    kinds = getattr(config, "layer_types", None)
    declared = getattr(config, "sliding_window", None)
    if kinds is None:
        if declared is not None and not any(windows) and declared < config.max_position_embeddings:
            raise ModelError(f"its configuration has a window of {declared} tokens, which its attention is not told")
        return
    for kind, window in zip(kinds, windows, strict=True):
        if kind not in _KNOWN_LAYERS:
            raise ModelError(f"it has layers of the kind {kind!r}")
        if _KNOWN_LAYERS[kind] != (window is not None):
            raise ModelError(f"a layer is {kind!r}, and its attention is given the window {window}")


def _same(what: str, values: Sequence[_Value]) -> _Value:
    if len(set(values)) != 1:
        raise ModelError(f"its layers have different {what}: {sorted(set(values), key=str)}")
    return values[0]
