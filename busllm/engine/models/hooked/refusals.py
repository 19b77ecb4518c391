"""Models that are refused by what they are called, before anything is read.

Owns: the reasons, in words.
Does not know: `transformers`' layers; what gets past here is still tested (`self_test.py`).
Next on the path: `models/hooked/load.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from busllm.errors import ModelError

_PURPOSES: Mapping[str, str] = MappingProxyType(
    {  # by the end of an architecture's name
        "ForConditionalGeneration": "it answers to images, sounds or an encoder's output",
        "ForImageTextToText": "it answers to images",
        "ForImageClassification": "it classifies images",
        "ForSequenceClassification": "it classifies texts",
        "ForTokenClassification": "it classifies tokens",
        "ForQuestionAnswering": "it marks answers in a text",
        "ForMaskedLM": "it fills gaps in a text and does not continue it",
        "Model": "it gives embeddings and no next token",
    }
)


def refuse_by_name(architecture: str, raw: Mapping[str, Any], causal: frozenset[str]) -> None:
    """Refuses what is no decoder-only language model.

    Args:
        architecture: as `config.json` names it.
        raw: the decoded `config.json`.
        causal: names of the causal language models that there are.

    Raises:
        ModelError: and why.
    """
    if raw.get("is_encoder_decoder"):
        raise _refusal(architecture, "it has an encoder, and only decoder models are served")
    is_multimodal = architecture.endswith("ForConditionalGeneration")
    if architecture in causal and not is_multimodal:
        return
    for ending, purpose in _PURPOSES.items():
        if architecture.endswith(ending):
            raise _refusal(architecture, purpose)
    custom = " Its repository brings code of its own, which is not run." if raw.get("auto_map") else ""
    raise ModelError(f"{architecture} cannot be served: this version of transformers does not have it.{custom}")


def _refusal(architecture: str, reason: str) -> ModelError:
    return ModelError(f"{architecture} cannot be served: {reason}.")
