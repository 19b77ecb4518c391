"""The reference of the errors is the error tree."""

from __future__ import annotations

from collections.abc import Iterator

import busllm.bus.protocol  # noqa: F401 - it adds an error of its own to the tree
from busllm.cli.arguments import EXIT_USAGE
from busllm.cli.main import EXIT_FAILURE, EXIT_SUPERSEDED, exit_status
from busllm.errors import (
    AlreadyRunning,
    BusllmError,
    ConfigError,
    FetchFailed,
    MissingPackage,
    ModelError,
    Superseded,
)
from busllm.stages.process import EXIT_CONFIG
from tests.docs.pages import code, read, sections, tables

PAGE = read("reference/errors.md")


def tree(root: type[BusllmError]) -> Iterator[type[BusllmError]]:
    """A class and all below it that the package defines."""
    if root.__module__.startswith(("busllm.errors", "busllm.bus.protocol")):
        yield root
    for below in root.__subclasses__():
        yield from tree(below)


def test_every_error_is_documented_with_code_status_and_whether_it_is_retryable() -> None:
    documented = sorted(
        (code(row["class"]), code(row["code"]), row["status"], row["retryable"])
        for rows in tables(PAGE)
        for row in rows
    )
    actual = sorted(
        (error.__name__, error.code, str(error.status), "yes" if error.retryable else "no")
        for error in set(tree(BusllmError))
    )
    assert documented == actual


def test_every_error_says_when_it_comes_and_what_to_do() -> None:
    for rows in tables(PAGE):
        for row in rows:
            assert row["when"] not in ("", "–"), row["class"]
            assert row["what to do"] != "", row["class"]


def test_the_types_of_a_section_are_those_that_it_names() -> None:
    for title, of_errors in (
        ("What a client did", {"invalid_request_error", "authentication_error"}),
        ("What the server cannot do now", {"server_error", "rate_limit_error"}),
    ):
        names = {code(row["class"]) for rows in tables(sections(PAGE)[title]) for row in rows}
        assert {error.type for error in tree(BusllmError) if error.__name__ in names} == of_errors
        assert all(f"`{type_}`" in sections(PAGE)[title] for type_ in of_errors)


def test_the_exit_statuses_are_those_of_the_commands() -> None:
    assert (
        "Exit status 2 for `ConfigError`, `ModelError`, `MissingPackage` and `AlreadyRunning`, 3 for `Superseded`, "
        "1 for `FetchFailed` and all others."
    ) in PAGE
    final = (ConfigError("x"), ModelError("x"), MissingPackage("x"), AlreadyRunning("x", 1))
    assert {exit_status(error) for error in final} == {EXIT_USAGE} == {EXIT_CONFIG} == {2}
    assert (exit_status(Superseded("x")), exit_status(FetchFailed("x"))) == (EXIT_SUPERSEDED, EXIT_FAILURE) == (3, 1)
