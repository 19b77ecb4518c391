"""The shape of the source: short files, short functions, docstrings, names that say something."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "busllm"
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50  # without the docstring
MAX_CONSTRUCTOR_ARGUMENTS = 8  # more go into a frozen config
MAX_ANCESTORS = 2  # of our own; the root of the error tree stands above its groups and is not counted
ROOT_OF_ERRORS = "BusllmError"
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}
ASYNCIO_IS_NEEDED_IN = {
    "bus/nats.py",  # nats-py is made for asyncio
    "bus/nats_session.py",
    "bus/nats_wire.py",
    "stages/frontend/server.py",  # so is hypercorn
}

SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), path)


def num_code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    docstring_lines = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring_lines


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """The classes, functions and methods whose names, and those around them, have no underscore."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{prefix}{node.name}.")


def protocol_methods() -> set[str]:
    """Methods that a protocol documents, so that its implementations need not."""
    return {
        method.name
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(method)
    }


DOCUMENTED_BY_A_PROTOCOL = protocol_methods()


def needs_docstring(name: str, node: Definition) -> bool:
    owner, _, method = name.rpartition(".")
    is_overload = any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in node.decorator_list)
    is_sentence = method.startswith("test_")  # a conformance test's name says it
    return not (is_overload or is_sentence or (owner and method in DOCUMENTED_BY_A_PROTOCOL))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_is_short_and_says_what_it_owns(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    tree = tree_of(path)
    assert ast.get_docstring(tree) or not tree.body, "no module docstring"
    assert path.stem not in FORBIDDEN_NAMES


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_of_tests_is_short_too(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_are_short(path: Path) -> None:
    long = {
        f"{path}:{node.lineno} {node.name}": num_code_lines(node)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and num_code_lines(node) > MAX_FUNCTION_LINES
    }
    assert not long


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_public_names_have_docstrings(path: Path) -> None:
    bare = [
        f"{path}:{node.lineno} {name}"
        for name, node in public_definitions(tree_of(path).body)
        if ast.get_docstring(node) is None and needs_docstring(name, node)
    ]
    assert not bare


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nobody_changes_module_state(path: Path) -> None:
    assert not [node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.Global)]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_that_a_docstring_names_exist(path: Path) -> None:
    named = re.findall(r"`([\w./]+(?:\.py|/))`", ast.get_docstring(tree_of(path)) or "")
    assert not [name for name in named if not exists(name, path)]


def exists(name: str, named_in: Path) -> bool:
    """Whether a path exists, as seen from where it is named or from any folder around it."""
    return any((folder / name).exists() for folder in named_in.parents if folder.is_relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_match_says_what_happens_in_all_other_cases(path: Path) -> None:
    """On a union or an enum that is `assert_never`, so that the type checker finds a new member."""
    matches = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Match)]
    assert not [match.lineno for match in matches if not takes_anything(match.cases[-1])]


def takes_anything(case: ast.match_case) -> bool:
    """Whether the pattern is `_`, or a name for it."""
    pattern = case.pattern
    while isinstance(pattern, ast.MatchAs) and pattern.pattern is not None:
        pattern = pattern.pattern
    return isinstance(pattern, ast.MatchAs) and case.guard is None


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_constructors_have_few_arguments(path: Path) -> None:
    constructors = [node for node in ast.walk(tree_of(path)) if is_constructor(node)]
    assert not [node.lineno for node in constructors if num_arguments(node) - 1 > MAX_CONSTRUCTOR_ARGUMENTS]


def is_constructor(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def num_arguments(function: ast.FunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)


def bases_of_all_classes() -> dict[str, dict[str, list[str]]]:
    """File → class → names of its bases."""
    return {
        name_of(path): {
            node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ClassDef)
        }
        for path in SOURCES
    }


def test_classes_have_few_ancestors() -> None:
    """Names stand for classes: that of the same file, or else any of the package."""
    by_file = bases_of_all_classes()
    anywhere = {name: bases for classes in by_file.values() for name, bases in classes.items()}

    def num_ancestors(name: str, classes: dict[str, list[str]]) -> int:
        own = [
            base for base in classes.get(name, anywhere.get(name, [])) if base in anywhere and base != ROOT_OF_ERRORS
        ]
        return max((1 + num_ancestors(base, classes) for base in own if base != name), default=0)

    deep = {
        f"{file} {name}": number
        for file, classes in by_file.items()
        for name in classes
        if (number := num_ancestors(name, classes)) > MAX_ANCESTORS
    }
    assert not deep


def test_asyncio_appears_only_where_a_library_needs_it() -> None:
    users = set()
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            if any(module.partition(".")[0] == "asyncio" for module in modules):
                users.add(name_of(path))
    assert users <= ASYNCIO_IS_NEEDED_IN


def test_the_project_speaks_of_itself_alone() -> None:
    """No path of a developer's machine and no registry's host stands in what is published."""
    words = ("/work" + "/", "/root" + "/", "pypi" + ".org", "huggingface" + ".co", "download.pytorch" + ".org")
    suffixes = {".py", ".md", ".toml", ".txt", ".yaml", ".service", ""}
    folders = ("busllm", "tests", "docs", "ops", "plugins", ".ci", "bench")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    for path in files:
        if path.suffix in suffixes and "__pycache__" not in path.parts and "egg-info" not in str(path):
            text = path.read_text(errors="replace")
            assert not [word for word in words if word in text], path
