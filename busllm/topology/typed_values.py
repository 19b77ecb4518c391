"""Turns plain TOML values into typed Structs, strictly.

Owns: the comparison of a value with the type its field declares, and words for what is wrong. Stricter than
`msgspec.convert`: 8000.0 is no whole number, `true` is no number, nan and infinity are refused.
Does not know: which Structs there are; files and lines (`read.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import NODEFAULT, inspect

from busllm.topology.nearest import nearest
from busllm.topology.toml_lines import KeyPath


class Mistake(Exception):
    """A value that does not fit; `read.py` turns it into a `ConfigError` with file and line."""

    def __init__(self, path: KeyPath, message: str, suggestion: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.message = message
        self.suggestion = suggestion


def key_text(path: KeyPath) -> str:
    """A path as people write it: `process[0].stages`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def typed_value(value: object, type_: type) -> Any:
    """Converts a value.

    Args:
        value: what the TOML parser gave.
        type_: a Struct type whose fields say what is allowed.

    Raises:
        Mistake: names the first value that does not fit.
    """
    declared = inspect.type_info(type_)
    return _convert(value, declared, (), declared)


def _convert(value: object, declared: inspect.Type, path: KeyPath, root: inspect.Type) -> Any:
    options = declared.types if isinstance(declared, inspect.UnionType) else (declared,)
    for option in options:
        if _same_form(value, option):
            return _convert_form(value, option, path, root)
    raise Mistake(path, f"is {_shown(value)}; it must be {_wanted(declared)}.", _nearest_literal(value, options))


def _same_form(value: object, declared: inspect.Type) -> bool:
    """Whether the value has the TOML form of the type (ranges and members come later)."""
    match declared:
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.IntType():
            return isinstance(value, int) and not isinstance(value, bool)
        case inspect.FloatType():
            return isinstance(value, int | float) and not isinstance(value, bool)
        case inspect.StrType():
            return isinstance(value, str)
        case inspect.LiteralType():
            return isinstance(value, str) and value in declared.values
        case inspect.VarTupleType():
            return isinstance(value, list)
        case inspect.StructType() | inspect.DictType():
            return isinstance(value, dict)
        case _:
            return False  # None has no form in TOML


def _convert_form(value: Any, declared: inspect.Type, path: KeyPath, root: inspect.Type) -> Any:
    match declared:
        case inspect.StructType():
            return _convert_table(value, declared, path, root)
        case inspect.VarTupleType():
            return tuple(_convert(item, declared.item_type, (*path, number), root) for number, item in enumerate(value))
        case inspect.FloatType():
            if not _in_range(float(value), declared):
                raise Mistake(path, f"is {value}; it must be {_wanted(declared)}.")
            return float(value)
        case inspect.IntType():
            if not _in_range(value, declared):
                raise Mistake(path, f"is {value}; it must be {_wanted(declared)}.")
        case inspect.StrType():
            if len(value) < (declared.min_length or 0):
                raise Mistake(path, "is empty.")
        case _:
            pass  # the others have no bounds
    return value


def _convert_table(table: Mapping[str, object], declared: inspect.StructType, path: KeyPath, root: inspect.Type) -> Any:
    fields = {field.name: field for field in declared.fields}
    for key in table:
        if key not in fields:
            raise _unknown_key(key, list(fields), path, root)
    for name, field in fields.items():
        if name not in table and field.default is NODEFAULT and field.default_factory is NODEFAULT:
            raise Mistake((*path, name), "is missing.")
    return declared.cls(**{key: _convert(value, fields[key].type, (*path, key), root) for key, value in table.items()})


def _unknown_key(key: str, known: list[str], path: KeyPath, root: inspect.Type) -> Mistake:
    near = nearest(key, known)
    place: KeyPath | None = (*path, near) if near is not None else _place_elsewhere(key, root)
    suggestion = None if place is None else key_text(place)
    allowed = "" if suggestion else f" Known here: {', '.join(known)}."
    return Mistake((*path, key), f"there is no such key.{allowed}", suggestion)


def _place_elsewhere(key: str, root: inspect.Type) -> KeyPath | None:
    """The table where a misplaced (and perhaps misspelt) key belongs."""
    places = {place[-1]: place for place in reversed(_all_keys(root, ()))}
    near = nearest(key, [name for name in places if isinstance(name, str)])
    return None if near is None else places[near]


def _all_keys(declared: inspect.Type, path: KeyPath) -> list[KeyPath]:
    """Every key below a type, to find the table where a misplaced one belongs."""
    match declared:
        case inspect.StructType():
            places: list[KeyPath] = []
            for field in declared.fields:
                here = (*path, field.name)
                places += [here, *_all_keys(field.type, here)]
            return places
        case inspect.VarTupleType():
            return _all_keys(declared.item_type, path)
        case inspect.UnionType():
            return [place for option in declared.types for place in _all_keys(option, path)]
        case _:
            return []


def _in_range(value: float, declared: inspect.IntType | inspect.FloatType) -> bool:
    return (
        math.isfinite(value)
        and (declared.ge is None or value >= declared.ge)
        and (declared.gt is None or value > declared.gt)
        and (declared.le is None or value <= declared.le)
        and (declared.lt is None or value < declared.lt)
    )


def _shown(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value}"'
        case dict():
            return "a table"
        case list():
            return "a list"
        case _:
            return str(value)


def _wanted(declared: inspect.Type) -> str:
    """What a type allows, in words."""
    match declared:
        case inspect.UnionType():
            return " or ".join(_wanted(option) for option in declared.types if not isinstance(option, inspect.NoneType))
        case inspect.LiteralType():
            return " or ".join(f'"{value}"' for value in declared.values)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"a whole number{_bounds(declared)}"
        case inspect.FloatType():
            return f"a number{_bounds(declared)}"
        case inspect.StrType():
            return "a text in quotes"
        case inspect.VarTupleType():
            return "a list"
        case _:
            return "a table"


def _bounds(declared: inspect.IntType | inspect.FloatType) -> str:
    bounds = [
        f"{word} {limit:g}"
        for word, limit in (
            ("of at least", declared.ge),
            ("over", declared.gt),
            ("of at most", declared.le),
            ("below", declared.lt),
        )
        if limit is not None
    ]
    return " " + " and ".join(bounds) if bounds else ""


def _nearest_literal(value: object, options: tuple[inspect.Type, ...]) -> str | None:
    if not isinstance(value, str):
        return None
    words = [word for option in options if isinstance(option, inspect.LiteralType) for word in option.values]
    return nearest(value, [word for word in words if isinstance(word, str)])
