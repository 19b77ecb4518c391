"""Grammars, and requests with them, that several tests use."""

from __future__ import annotations

import json
from typing import Any

from busllm.sampling import Grammar, GrammarKind, SamplingParams
from busllm.testing.engine_driver import Record

PROMPT = [ord(letter) for letter in "Say something."]
NUMBERS = Grammar(GrammarKind.REGEX, r"[0-9]{3}(-[0-9]{3}){8}")
OPEN_END = Grammar(GrammarKind.REGEX, r"[a-f]{5,40}")
PERSON = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 999}, "kind": {"enum": ["cat", "dog"]}},
            "required": ["age", "kind"],
            "additionalProperties": False,
        }
    ),
)
BROKEN = Grammar(GrammarKind.REGEX, "[0-9", "structured_outputs.regex")


def params(grammar: Grammar | None, **values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "seed": 1, **values}, grammar=grammar)


def text_of(record: Record) -> str:
    return bytes(token_id for token_id in record.output if token_id < 256).decode()
