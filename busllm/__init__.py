"""busllm: an LLM inference server whose stages are actors on a message bus."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from busllm.client import Client
    from busllm.llm import LLM, Completion
    from busllm.sampling import Grammar, GrammarKind, SamplingParams

__all__ = ["LLM", "Client", "Completion", "Grammar", "GrammarKind", "SamplingParams"]

# Loaded when first asked for: `import busllm` in a process that only routes requests must not import an engine.
_HOMES = {
    "LLM": "busllm.llm",
    "Client": "busllm.client",
    "Completion": "busllm.llm",
    "Grammar": "busllm.sampling",
    "GrammarKind": "busllm.sampling",
    "SamplingParams": "busllm.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'busllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
