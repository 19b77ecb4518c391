"""Pages lead where they say, and name files, tests and commands that exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from busllm.cli.arguments import Parser
from busllm.cli.main import COMMANDS
from busllm.topology.read import parse_topology
from tests.docs.pages import DOCS, ROOT, Block, all_pages, anchors, blocks, links, without_code

PAGES = all_pages()
SHELL_BLOCKS = [block for page in PAGES for block in blocks(page, "sh")]
COMMAND_LINES = [
    (block, line)
    for block in SHELL_BLOCKS
    for line in block.code.replace("\\\n", " ").splitlines()
    if re.match(r"(\.venv/bin/)?busllm ", line)
]
NAMED_FILE = re.compile(r"`((?:busllm|tests|plugins|ops|docs|bench)/[\w./-]*[\w/])(?:::(\w+))?`")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_page_and_a_heading_that_exist(page: Path) -> None:
    broken = []
    for target in links(page.read_text(encoding="utf-8")):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        if not to.exists() or (anchor and anchor not in anchors(to.read_text(encoding="utf-8"))):
            broken.append(target)
    assert not broken


def test_every_page_is_reached_from_the_index() -> None:
    reached, open_pages = set(), [DOCS / "README.md"]
    while open_pages:
        page = open_pages.pop()
        reached.add(page)
        for target in links(page.read_text(encoding="utf-8")):
            to = (page.parent / target.partition("#")[0]).resolve()
            if to.suffix == ".md" and to.is_file() and to.is_relative_to(DOCS) and to not in reached:
                open_pages.append(to)
    assert set(DOCS.rglob("*.md")) == reached


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_and_test_that_a_page_names_exists(page: Path) -> None:
    missing = []
    for path, test in NAMED_FILE.findall(without_code(page.read_text(encoding="utf-8"))):
        file = ROOT / path
        if not file.exists() or (test and test not in functions_of(file)):
            missing.append(f"{path}::{test}" if test else path)
    assert not missing


def functions_of(file: Path) -> set[str]:
    """Names of all functions in a file of Python."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in blocks(page) if block.language in ("python", "py")], ids=str
)
def test_every_piece_of_python_compiles(block: Block) -> None:
    compile(block.code, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", [block for page in PAGES for block in blocks(page, "toml")], ids=str)
def test_every_piece_of_toml_is_a_topology_or_a_project(block: Block) -> None:
    if "project" not in tomllib.loads(block.code):
        parse_topology(block.code, str(block))


@pytest.mark.parametrize(("block", "line"), COMMAND_LINES, ids=[f"{block} {line}" for block, line in COMMAND_LINES])
def test_every_command_line_is_read_by_the_command(block: Block, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    for operator in ("&", "|", ">", "&&", ";"):
        words = words[: words.index(operator)] if operator in words else words
    if words in (["--help"], ["--version"]):
        return
    command = next((command for command in COMMANDS if command.name == words[0]), None)
    assert command is not None, f"{block}: there is no command {words[0]!r}"
    module = importlib.import_module(command.module)
    parser = Parser(prog=f"busllm {command.name}")
    module.add_arguments(parser)
    parser.parse_args(words[1:])


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"`make ([a-z-]+)", text))
        for block in blocks(page, "sh"):
            named |= set(re.findall(r"^make ([a-z-]+)", block.code, re.MULTILINE))
        assert named <= targets, page
