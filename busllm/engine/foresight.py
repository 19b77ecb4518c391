"""What can be told of a model before its weights are read: how it will be computed, or why it cannot be.

Owns: the order of the questions that a start puts to the small files, so that `busllm check` puts the same ones.
Does not know: what weights and devices say (`loader.py`); imports no torch.
Next on the path: `engine/loader.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from busllm.engine.forward_choice import ForwardPass, ForwardWish, choose_forward, why_not_compiled
from busllm.engine.models.config import SUPPORTED_ARCHITECTURES, ModelConfig, architecture_of, read_config
from busllm.errors import ModelError
from busllm.model_store.files import ModelFiles, read_json


class Foreseen(msgspec.Struct, frozen=True):
    """How a model will be computed.

    Attributes:
        raw: the decoded `config.json`.
        shape: of a model with a decoder here; None = it runs inside `transformers`.
        forward: by which forward pass.
        why_not_compiled: the reason, when it is not the compiled one; a clause about that one.
    """

    raw: Mapping[str, Any]
    shape: ModelConfig | None
    forward: ForwardPass
    why_not_compiled: str | None


def foresee(files: ModelFiles, wish: ForwardWish) -> Foreseen:
    """Chooses how to compute a model.

    Args:
        files: of the model.
        wish: what is asked for.

    Raises:
        ModelError: the model cannot be served, or not in this way.
        ConfigError: a setting cannot work with this model.
    """
    if files.config is None:
        raise ModelError(f"The model {files.name!r} has no config.json, so its architecture is unknown.")
    raw = read_json(files.config)
    shape = own_shape(raw)
    foreseen = Foreseen(raw, shape, choose_forward(wish, shape), why_not_compiled(wish, shape))
    if shape is None:
        _refuse_what_transformers_cannot(files, raw, wish.num_ranks)
    return foreseen


def own_shape(raw: Mapping[str, Any]) -> ModelConfig | None:
    """The shape of a model with a decoder here; None = only `transformers` can compute the architecture.

    Raises:
        ModelError: the configuration names no architecture, or asks for what is not done.
    """
    return read_config(raw) if architecture_of(raw) in SUPPORTED_ARCHITECTURES else None


def _refuse_what_transformers_cannot(files: ModelFiles, raw: Mapping[str, Any], num_ranks: int) -> None:
    if num_ranks > 1:
        raise ModelError(f"{architecture_of(raw)} runs inside transformers and cannot be split among ranks.")
    if files.directory is None or not files.safetensors:
        raise ModelError(f"{architecture_of(raw)} can be loaded from safetensors only.")
