"""The reference of the HTTP interface says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from busllm import errors
from busllm.sampling import SamplingParams
from busllm.stages.frontend.bodies import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from busllm.stages.frontend.openapi import document_route
from busllm.stages.frontend.routes import ENDPOINTS
from busllm.stages.frontend.sampling_fields import HARMLESS, MAX_N, MAX_STOPS, refused_fields

REFERENCE = (Path(__file__).parents[3] / "docs" / "reference" / "http.md").read_text()


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    return re.split(r"\n##+ ", REFERENCE.partition(f"# {title}\n")[2])[0]


def field_names(body: type[msgspec.Struct], without: type[msgspec.Struct] | None = None) -> set[str]:
    shared = {field.name for field in msgspec.structs.fields(without)} if without else set()
    return {field.name for field in msgspec.structs.fields(body)} - shared


def words(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def first_column(text: str) -> set[str]:
    return set(re.findall(r"^\| `([a-z_]+)`", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("title", "body", "shared"),
    [
        ("Both generating endpoints", GenerationBody, None),
        ("`POST /v1/chat/completions`", ChatBody, GenerationBody),
        ("`POST /v1/completions`", CompletionBody, GenerationBody),
    ],
)
def test_every_field_is_documented_and_every_documented_field_exists(
    title: str, body: type[msgspec.Struct], shared: type[msgspec.Struct] | None
) -> None:
    names = field_names(body, shared)
    text = section(title)
    assert names <= words(text)
    assert first_column(text) <= names
    listed = re.findall(r"(?:without effect|brackets): ([^.]*)\.", text)
    in_lists = words(re.sub(r"\([^)]*\)", "", " ".join(listed)))
    assert first_column(text) | in_lists == names


def test_the_fields_of_the_tokenizer_endpoints_are_documented() -> None:
    text = section("`POST /tokenize` and `POST /detokenize`")
    assert field_names(TokenizeBody) | field_names(DetokenizeBody) <= words(text)


def test_every_refused_field_is_documented_with_its_harmless_values() -> None:
    for name in (*refused_fields(ChatBody), *refused_fields(CompletionBody)):
        assert f"`{name}`" in REFERENCE
        for value in HARMLESS.get(name, ()):
            shown = msgspec.json.format(msgspec.json.encode(value), indent=0).decode().replace("\n", "")
            assert f"`{shown}`" in REFERENCE, (name, shown)


def test_every_endpoint_is_documented() -> None:
    for route in (*ENDPOINTS, document_route(ENDPOINTS)):
        assert f"{route.method} {route.path}" in REFERENCE


def test_every_documented_error_has_the_code_and_status_of_the_error_tree() -> None:
    tree = {
        (error.status, error.code)
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.BusllmError)
    }
    rows = re.findall(r"^\| (\d{3}) \| ([^|]*) \|", section("Errors"), re.MULTILINE)
    documented = {(int(status), code) for status, codes in rows for code in words(codes)}
    assert documented <= tree
    assert {pair for pair in tree if 400 < pair[0] < 500} <= documented


def test_the_documented_numbers_are_those_of_the_code() -> None:
    defaults = SamplingParams()
    shared = section("Both generating endpoints")
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        row = re.search(rf"^\| `{name}` \| [^|]* \| ([^|]*) \|", shared, re.MULTILINE)
        assert row is not None
        assert float(row[1]) == getattr(defaults, name)
    assert f"1 … {MAX_N}" in shared
    assert f"up to {MAX_STOPS}" in shared
