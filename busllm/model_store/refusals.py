"""Models that do something else than continue a text: refused by what their configuration calls them.

Owns: the reasons, in words.
Does not know: how a model is computed. Of the ones that get past here the engine still finds some that it cannot serve.
Next on the path: `description.py`, which every stage asks at its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from busllm.errors import ModelError
from busllm.model_store.config_values import ConfigValues

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
_HAS_A_HEAD = "LMHeadModel"  # older names of models that do give a next token


def refuse_other_kinds(config: Mapping[str, Any]) -> None:
    """Refuses what is no decoder-only language model.

    Args:
        config: the decoded `config.json`.

    Raises:
        ModelError: and why.
    """
    for name in ConfigValues(config).texts_or_none("architectures") or ():
        if config.get("is_encoder_decoder"):
            raise _refusal(name, "it has an encoder, and only decoder models are served")
        if name.endswith(_HAS_A_HEAD):
            continue
        for ending, purpose in _PURPOSES.items():
            if name.endswith(ending):
                raise _refusal(name, purpose)


def _refusal(architecture: str, reason: str) -> ModelError:
    return ModelError(f"{architecture} cannot be served: {reason}.")
