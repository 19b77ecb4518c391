"""Instances of two versions understand each other: old bytes today, today's bytes by an old type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_type_hints

import msgspec
import pytest

from busllm.errors import MalformedMessage
from busllm.messages.codec import encode, encode_json
from tests.messages.examples import BEFORE_GRAMMARS, EXAMPLES, GOLDEN, IN_JSON


def golden_bytes(name: str) -> bytes:
    return GOLDEN[name].encode() if name in IN_JSON else bytes.fromhex(GOLDEN[name])


def encoded(name: str, message: Any) -> bytes:
    return encode_json(message) if name in IN_JSON else encode(message)


@pytest.mark.parametrize("name", EXAMPLES)
def test_old_bytes_decode_with_todays_type(name: str) -> None:
    message, decoder = EXAMPLES[name]
    assert decoder.decode(golden_bytes(name)) == message


@pytest.mark.parametrize("name", BEFORE_GRAMMARS)
def test_bytes_from_before_grammars_decode_without_one(name: str) -> None:
    message, decoder = EXAMPLES[name]
    read = decoder.decode(bytes.fromhex(BEFORE_GRAMMARS[name]))
    assert read == msgspec.structs.replace(message, params=msgspec.structs.replace(message.params, grammar=None))


@pytest.mark.parametrize("name", EXAMPLES)
def test_todays_bytes_are_the_golden_ones(name: str) -> None:
    assert encoded(name, EXAMPLES[name][0]) == golden_bytes(name), "fields are appended, and get a new golden line"


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "part"])
def test_an_old_type_reads_todays_bytes_and_today_reads_its_bytes(name: str) -> None:
    """The old type lacks every field that has a default, as if each had been appended since."""
    message, decoder = EXAMPLES[name]
    today = type(message)
    required, appended = fields_of(today)
    old = old_type(today, required)
    decode = msgspec.json.decode if name in IN_JSON else msgspec.msgpack.decode
    read = decode(encoded(name, message), type=old)
    assert {field: getattr(read, field) for field in required} == {field: getattr(message, field) for field in required}
    upgraded = decoder.decode(encoded(name, read))
    for field in required:
        assert getattr(upgraded, field) == getattr(message, field)
    defaults = today(**{field: getattr(message, field) for field in required})
    for field in appended:
        assert getattr(upgraded, field) == getattr(defaults, field)


def fields_of(today: type[msgspec.Struct]) -> tuple[list[str], list[str]]:
    """Names of the fields without and with a default."""
    required = [field.name for field in msgspec.structs.fields(today) if field.required]
    appended = [field.name for field in msgspec.structs.fields(today) if not field.required]
    assert list(today.__struct_fields__) == [*required, *appended]
    return required, appended


def old_type(today: type[msgspec.Struct], fields: list[str]) -> type[msgspec.Struct]:
    hints, config = get_type_hints(today, include_extras=True), today.__struct_config__
    return msgspec.defstruct(
        "Old", [(field, hints[field]) for field in fields], tag=config.tag, array_like=config.array_like
    )


def structs_within(value: Any) -> Iterator[msgspec.Struct]:
    """A message and all Structs in it."""
    if isinstance(value, msgspec.Struct):
        yield value
        for field in value.__struct_fields__:
            yield from structs_within(getattr(value, field))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from structs_within(item)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in IN_JSON])
def test_what_travels_with_tokens_is_frozen_positional_and_not_tracked_by_the_collector(name: str) -> None:
    for struct in structs_within(EXAMPLES[name][0]):
        config = struct.__struct_config__
        assert config.frozen, struct
        assert config.array_like, struct
        assert not config.gc, struct


@pytest.mark.parametrize("name", EXAMPLES)
def test_damaged_bytes_are_malformed_and_nothing_else(name: str) -> None:
    payload, decoder = golden_bytes(name), EXAMPLES[name][1]
    for damaged in (payload[:-1], payload[: len(payload) // 2], b"", b"\xc1" + payload, b"[" * 100_000):
        with pytest.raises(MalformedMessage):
            decoder.decode(damaged)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in IN_JSON and name != "part"])
def test_an_inbox_refuses_the_messages_of_others(name: str) -> None:
    message, decoder = EXAMPLES[name]
    for other, (stranger, its_decoder) in EXAMPLES.items():
        if other not in IN_JSON and other != "part" and its_decoder is not decoder:
            with pytest.raises(MalformedMessage):
                decoder.decode(encode(stranger))
    assert decoder.decode(encode(message)) == message
