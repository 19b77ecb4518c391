"""Loads a model of `transformers`, tests it, and refuses it with the reason when it cannot be served.

Owns: the loading, and the order of the checks.
Does not know: what the checks compare (`survey.py`, `self_test.py`), where windows stand (`short_window.py`).
Next on the path: `models/hooked/hooked_model.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from busllm.engine.attention.protocol import AttentionFactory
from busllm.engine.models.hooked.hook import EAGER, AttentionHook
from busllm.engine.models.hooked.hooked_model import HookedModel, body_of
from busllm.engine.models.hooked.self_test import check, sample_sequences
from busllm.engine.models.hooked.short_window import short_window
from busllm.errors import ModelError

# What a model's own code raises when it is used in a way that it does not foresee.
_ERRORS_OF_MODELS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError),
)
_NAMED_AT_MOST = 5  # tensors that one message names


@dataclass(frozen=True)
class HookedSettings:
    """How a model is loaded.

    Attributes:
        attention: the backend that is to serve.
        max_context_tokens: longest sequence.
        device, dtype: of the weights and of the KV cache.
    """

    attention: AttentionFactory
    max_context_tokens: int
    device: torch.device
    dtype: torch.dtype


def refuse_before_weights(directory: Path, raw: Mapping[str, Any]) -> None:
    """Refuses what can be told from the architecture alone. What its layers do is seen when it is loaded.

    Args:
        directory: with `config.json`.
        raw: the decoded `config.json`, which names an architecture.

    Raises:
        ModelError: the model cannot be served, and why.
    """
    architecture: str = raw["architectures"][0]
    _refuse_unknown(architecture, raw)
    with _reasons(architecture):
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):  # no memory, no numbers
            model = getattr(transformers, architecture)(config)
        _refuse_without_positions(model)


def load_hooked(directory: Path, raw: Mapping[str, Any], settings: HookedSettings) -> HookedModel:
    """Loads and tests.

    Args:
        directory: with `config.json` and safetensors.
        raw: the decoded `config.json`, which names an architecture.
        settings: how.

    Raises:
        ModelError: the model cannot be served, and why.
    """
    architecture: str = raw["architectures"][0]
    _refuse_unknown(architecture, raw)
    with _reasons(architecture):
        model = _load(directory, architecture, settings)
        return _prepare(model, settings)


@contextmanager
def _reasons(architecture: str) -> Iterator[None]:
    """Makes sentences of the clauses in which a model's faults are told, and of what its own code raises."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{architecture} cannot be served: {error.message.rstrip('.')}.") from error
    except _ERRORS_OF_MODELS as error:
        reason = str(error).strip().splitlines() or [""]
        raise ModelError(
            f"{architecture} cannot be served: its code in transformers stopped with "
            f"{type(error).__name__}: {reason[0]}"
        ) from error


def _refuse_unknown(architecture: str, raw: Mapping[str, Any]) -> None:
    if architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return
    custom = " Its repository brings code of its own, which is not run." if raw.get("auto_map") else ""
    raise ModelError(f"{architecture} cannot be served: this version of transformers does not have it.{custom}")


def _load(directory: Path, architecture: str, settings: HookedSettings) -> PreTrainedModel:
    with _without_progress_bars():
        model, found = getattr(transformers, architecture).from_pretrained(
            directory,
            dtype=settings.dtype,
            attn_implementation=EAGER,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    # transformers would go on with random numbers in their place.
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"its weights are not complete; missing: {_listed(missing)}")
    if found["mismatched_keys"]:
        raise ModelError(f"weights have other shapes than config.json says: {_listed(found['mismatched_keys'])}")
    return model.to(settings.device).eval()  # type: ignore[no-any-return]


def _prepare(model: PreTrainedModel, settings: HookedSettings) -> HookedModel:
    """Asks the whole model first, as it is, and then compares."""
    vocab_size = model.config.get_text_config().vocab_size
    _refuse_without_positions(model)
    hook = AttentionHook(model)
    with short_window(model) as window:
        sequences = sample_sequences(vocab_size, window, settings.max_context_tokens)
        expected = [_own_logits(model, sequence) for sequence in sequences]
        hooked = HookedModel(model, hook)
        check(hooked, sequences, expected, settings.attention, device=settings.device, dtype=settings.dtype)
    hooked.survey_anew()
    return hooked


def _refuse_without_positions(model: PreTrainedModel) -> None:
    if "position_ids" not in inspect.signature(body_of(model).forward).parameters:
        raise ModelError("its layers take no positions, and several sequences stand in one row here")


@torch.inference_mode()
def _own_logits(model: PreTrainedModel, sequence: list[int]) -> torch.Tensor:
    """With the attention that the model was loaded with: float32 (num_tokens, vocab_size)."""
    logits: torch.Tensor = model(input_ids=torch.tensor([sequence], device=model.device), use_cache=False).logits
    return logits[0].float()


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """A server's log is no terminal. The setting is the library's and is put back."""
    were_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if were_shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _listed(names: Iterable[object]) -> str:
    shown = [str(name) for name in names]
    more = len(shown) - _NAMED_AT_MOST
    return ", ".join(shown[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
