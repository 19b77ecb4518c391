"""From the fields that say what an answer must look like to a `Grammar`.

Owns: `response_format` and `structured_outputs`: their forms, and that only one of them asks for something.
Does not know: whether a grammar compiles; the tokenizer finds that out.
Next on the path: `sampling_fields.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from busllm.errors import InvalidRequest
from busllm.sampling import Grammar, GrammarKind

_ANY_OBJECT = '{"type":"object"}'
_FORMATS = ("text", "json_object", "json_schema")

Schema = Annotated[dict[str, Any] | bool, Meta(description="A JSON schema.")]


class NamedSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema as OpenAI's clients send it."""

    schema: Schema
    name: Annotated[str | None, Meta(description="Without effect.")] = None
    description: Annotated[str | None, Meta(description="Without effect.")] = None
    strict: Annotated[bool | None, Meta(description="Without effect: the schema is always kept to.")] = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the answer must look like, in OpenAI's form."""

    type: Annotated[str, Meta(description="text, json_object or json_schema.")]
    json_schema: Annotated[NamedSchema | None, Meta(description="Only with the type json_schema.")] = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the answer must look like, in one of more forms than OpenAI has."""

    json: Annotated[dict[str, Any] | bool | str | None, Meta(description="A JSON schema, as it is or as a text.")] = (
        None
    )
    json_object: Annotated[bool | None, Meta(description="true = any JSON object.")] = None
    regex: Annotated[str | None, Meta(description="A regular expression that the whole answer matches.")] = None
    choice: Annotated[list[str] | None, Meta(description="The answer is one of these texts.")] = None
    grammar: Annotated[str | None, Meta(description="A context-free grammar in the notation of Lark.")] = None


def grammar_of(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Grammar | None:
    """The grammar that a request asks for, if it does.

    Raises:
        InvalidRequest: an unknown type, several forms at once, or a form that says nothing.
    """
    formatted = None if response_format is None else _of_format(response_format)
    if outputs is None:
        return formatted
    if formatted is not None:
        raise InvalidRequest(
            "response_format and structured_outputs both say what the answer must look like; give one of them.",
            param="structured_outputs",
        )
    return _of_outputs(outputs)


def _of_format(asked: ResponseFormat) -> Grammar | None:
    if asked.type not in _FORMATS:
        raise InvalidRequest(
            f"response_format.type is {asked.type[:100]!r}; it must be one of {', '.join(_FORMATS)}.",
            param="response_format.type",
        )
    if (asked.json_schema is not None) != (asked.type == "json_schema"):
        raise InvalidRequest(
            "response_format.json_schema goes with the type json_schema, and with no other.",
            param="response_format.json_schema",
        )
    if asked.json_schema is not None:
        return _schema(asked.json_schema.schema, "response_format.json_schema.schema")
    return Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT, "response_format") if asked.type == "json_object" else None


def _of_outputs(asked: StructuredOutputs) -> Grammar:
    given = {name: value for name, value in msgspec.structs.asdict(asked).items() if value is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs has {len(given)} of {', '.join(asked.__struct_fields__)}; it must have one.",
            param="structured_outputs",
        )
    ((name, value),) = given.items()
    param = f"structured_outputs.{name}"
    match name:
        case "json":
            return Grammar(GrammarKind.JSON_SCHEMA, value, param) if isinstance(value, str) else _schema(value, param)
        case "json_object":
            return Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT, param)
        case "regex":
            return Grammar(GrammarKind.REGEX, value, param)
        case "choice":
            return Grammar(GrammarKind.CHOICE, msgspec.json.encode(value).decode(), param)
        case _:
            return Grammar(GrammarKind.LARK, value, param)


def _schema(schema: dict[str, Any] | bool, param: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode(), param)
