"""What the fields of a body say of an answer's form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from busllm.errors import InvalidRequest
from busllm.sampling import Grammar, GrammarKind
from busllm.stages.frontend.bodies import ChatBody, CompletionBody
from busllm.stages.frontend.decoding import BodyDecoder
from busllm.stages.frontend.grammar_fields import grammar_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"maximum": 10**30}}, "required": ["b"]}


def asked(**fields: Any) -> Grammar | None:
    """The grammar of a body, the same of both kinds."""
    grammars = []
    for body_type, prompt in ((ChatBody, {"messages": []}), (CompletionBody, {"prompt": "x"})):
        body = BodyDecoder(body_type).decode(json.dumps({"model": "m", **prompt, **fields}).encode())
        grammars.append(grammar_of(body.response_format, body.structured_outputs))
    assert grammars[0] == grammars[1]
    return grammars[0]


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": None}]
)
def test_nothing_asked_is_no_grammar(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


def test_any_object_is_the_schema_of_an_object() -> None:
    grammar = asked(response_format={"type": "json_object"})
    assert grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}', "response_format")
    other = asked(structured_outputs={"json_object": True})
    assert other == Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}', "structured_outputs.json_object")


def test_a_schema_keeps_the_order_of_its_keys_and_its_large_numbers() -> None:
    named = {"name": "answer", "strict": True, "description": "d", "schema": SCHEMA}
    for grammar in (
        asked(response_format={"type": "json_schema", "json_schema": named}),
        asked(structured_outputs={"json": SCHEMA}),
        asked(structured_outputs={"json": json.dumps(SCHEMA)}),
    ):
        assert grammar is not None
        assert grammar.kind is GrammarKind.JSON_SCHEMA
        assert json.loads(grammar.text) == SCHEMA
        assert list(json.loads(grammar.text)["properties"]) == ["b", "a"]


@pytest.mark.parametrize("schema", [True, False])
def test_true_and_false_are_schemas_too(schema: bool) -> None:
    text = json.dumps(schema)
    named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert asked(response_format=named) == Grammar(GrammarKind.JSON_SCHEMA, text, "response_format.json_schema.schema")
    assert asked(structured_outputs={"json": schema}) == Grammar(
        GrammarKind.JSON_SCHEMA, text, "structured_outputs.json"
    )


def test_each_form_has_its_kind_and_names_its_field() -> None:
    assert asked(structured_outputs={"regex": "[0-9]+"}) == Grammar(
        GrammarKind.REGEX, "[0-9]+", "structured_outputs.regex"
    )
    assert asked(structured_outputs={"grammar": 'start: "x"'}) == Grammar(
        GrammarKind.LARK, 'start: "x"', "structured_outputs.grammar"
    )
    choice = asked(structured_outputs={"choice": ['a"b', "é"]})
    assert choice is not None
    assert (choice.kind, choice.param) == (GrammarKind.CHOICE, "structured_outputs.choice")
    assert json.loads(choice.text) == ['a"b', "é"]


def test_text_beside_structured_outputs_asks_for_nothing() -> None:
    assert asked(response_format={"type": "text"}, structured_outputs={"regex": "a"}) is not None


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("guided_json", '"structured_outputs": {"json": …}'),
        ("guided_regex", '"structured_outputs": {"regex": …}'),
        ("guided_choice", '"structured_outputs": {"choice": …}'),
        ("prompt_logprobs", '"echo": true with "logprobs", at /v1/completions'),
    ],
)
def test_a_field_of_another_server_is_refused_with_the_way_to_ask_here(field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        asked(**{field: 1})
    assert error.value.message == f"Unknown field {field!r}. Here it is {words}."
