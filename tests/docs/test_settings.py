"""The reference of the topology file has every key, with type, range and default."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec import NODEFAULT, inspect

from busllm.cli.main import ENVIRONMENT
from busllm.topology.config import (
    BusConfig,
    BusTls,
    DetokenizerConfig,
    FrontendConfig,
    FrontendTls,
    ModelConfig,
    NullConfig,
    ProcessConfig,
    SchedulerConfig,
    TokenizerConfig,
    Topology,
    TraceConfig,
)
from busllm.topology.read import load_topology
from tests.docs.pages import ROOT, code, read, sections, table

SECTIONS = sections(read("reference/settings.md"))
TABLES: dict[str, type[msgspec.Struct]] = {
    "bus": BusConfig,
    "bus.tls": BusTls,
    "model": ModelConfig,
    "model.null": NullConfig,
    "frontend": FrontendConfig,
    "frontend.tls": FrontendTls,
    "tokenizer": TokenizerConfig,
    "scheduler": SchedulerConfig,
    "detokenizer": DetokenizerConfig,
    "trace": TraceConfig,
    "process": ProcessConfig,
}
BOUNDS = (("≥", "ge"), (">", "gt"), ("≤", "le"), ("<", "lt"))


def structs_below(declared: inspect.Type) -> set[type]:
    """All Structs that a type can hold."""
    match declared:
        case inspect.StructType():
            return {declared.cls}.union(*(structs_below(field.type) for field in declared.fields))
        case inspect.UnionType():
            return set().union(*(structs_below(option) for option in declared.types))
        case inspect.VarTupleType():
            return structs_below(declared.item_type)
        case _:
            return set()


def type_text(declared: inspect.Type) -> str:
    """A type as the page writes it."""
    match declared:
        case inspect.UnionType():
            return " or ".join(type_text(one) for one in declared.types if not isinstance(one, inspect.NoneType))
        case inspect.LiteralType():
            return " or ".join(f'"{value}"' for value in declared.values)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"whole number{range_text(declared)}"
        case inspect.FloatType():
            return f"number{range_text(declared)}"
        case inspect.StrType():
            return "text"
        case inspect.VarTupleType():
            return f"list of {type_text(declared.item_type)}"
        case inspect.StructType() | inspect.DictType():
            return "table"
        case _:
            raise AssertionError(declared)


def range_text(declared: inspect.IntType | inspect.FloatType) -> str:
    limits = [(sign, getattr(declared, name)) for sign, name in BOUNDS]
    return "".join(
        f", {sign} {limit:g}" if limit < 1e6 else f", {sign} {limit}" for sign, limit in limits if limit is not None
    )


def default_text(field: inspect.Field) -> str:
    """A default in TOML; nothing for a key that is left out, or for a table of its own."""
    if field.default_factory is not NODEFAULT:
        return json.dumps(field.default_factory())
    if field.default is NODEFAULT:
        return "required"
    return "" if field.default is None else json.dumps(field.default)


def keys_of(type_: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    declared = inspect.type_info(type_)
    assert isinstance(declared, inspect.StructType)
    return [(field.name, type_text(field.type), default_text(field)) for field in declared.fields]


def test_every_table_of_the_file_has_a_section() -> None:
    assert structs_below(inspect.type_info(Topology)) == {Topology, *TABLES.values()}
    top = inspect.type_info(Topology)
    assert isinstance(top, inspect.StructType)
    scalars = {code(row["key"]) for row in table(SECTIONS["Top level"])}
    assert {field.name for field in top.fields} == scalars | {name for name in TABLES if "." not in name}
    assert all(code(row["default"]) == json.dumps(Topology().cluster) for row in table(SECTIONS["Top level"]))


@pytest.mark.parametrize("name", TABLES)
def test_every_key_is_documented_in_order_with_type_range_and_default(name: str) -> None:
    documented = [(code(row["key"]), row["type"], code(row["default"])) for row in table(SECTIONS[name])]
    assert documented == keys_of(TABLES[name])


def test_the_environment_variables_are_documented() -> None:
    assert {code(row["variable"]) for row in table(SECTIONS["Environment"])} == set(ENVIRONMENT)


def test_the_file_with_all_defaults_is_the_built_in_topology() -> None:
    file = Path(ROOT / "local.toml")
    assert load_topology(file) == Topology()
    text = file.read_text(encoding="utf-8")
    for name, type_ in TABLES.items():
        for key, _, _ in keys_of(type_):
            if name not in ("bus.tls", "model.null") and key != "options":
                assert f"{key} = " in text, f"local.toml has no line with {name}.{key}"
