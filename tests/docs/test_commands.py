"""docs/reference/commands.md has every command with every argument, and no other."""

from __future__ import annotations

import argparse
import importlib

import pytest

from busllm.cli.arguments import Parser
from busllm.cli.main import COMMANDS, ENVIRONMENT, Command
from tests.docs.pages import code, read, sections, table

SECTIONS = sections(read("reference/commands.md"))


def arguments_of(command: Command) -> dict[str, str]:
    """Each argument as a reader types it, with its default."""
    parser = Parser(prog=command.name)
    importlib.import_module(command.module).add_arguments(parser)
    found = {}
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            has_none = action.default is None or action.default is False
            found[as_typed(action)] = "–" if has_none else str(action.default)
    return found


def as_typed(action: argparse.Action) -> str:
    name = action.option_strings[0] if action.option_strings else str(action.metavar)
    if action.nargs == "?":
        return f"[{name}]"
    if action.nargs == "+":
        return f"{name}…"
    takes_value = action.option_strings and action.nargs != 0
    return f"{name} {action.metavar}" if takes_value else name


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_commands_arguments_and_defaults_are_those_of_the_page(command: Command) -> None:
    rows = table(SECTIONS[f"busllm {command.name}"])
    assert {code(row["argument"]): row["default"] for row in rows} == arguments_of(command)
    assert all(row["does"] for row in rows)


def test_the_page_lists_the_commands_in_their_order() -> None:
    assert [heading for heading in SECTIONS if heading.startswith("busllm ")] == [
        f"busllm {one.name}" for one in COMMANDS
    ]
    listed = table(SECTIONS["Commands"])
    assert [row["command"] for row in listed] == [f"[`{one.name}`](#busllm-{one.name})" for one in COMMANDS]


def test_every_environment_variable_is_explained() -> None:
    assert [code(row["variable"]) for row in table(SECTIONS["Environment"])] == list(ENVIRONMENT)
