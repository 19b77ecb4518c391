"""What log lines look like, and what never stands in them."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog

from busllm.telemetry.logging import configure_logging, get_logger

SECRET = "zanzibar"


class Console(io.StringIO):
    """A stderr that is a terminal, or is not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def console(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Console]:
    console = Console(request.param)
    monkeypatch.setattr(sys, "stderr", console)
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers, root.level
    configure_logging()
    yield console
    structlog.configure(**before)
    root.handlers = handlers
    root.setLevel(level)


def fail(prompt: str) -> None:
    raise ZeroDivisionError(f"a bug that a prompt of {len(prompt)} characters meets")


def test_a_traceback_says_where_and_not_with_which_prompt(console: Console) -> None:
    try:
        fail(SECRET)
    except ZeroDivisionError:
        get_logger("busllm.test", stage="tokenizer").exception("message_failed")
    text = console.getvalue()
    assert "a bug that a prompt of 8 characters meets" in text
    assert "in fail" in text
    assert SECRET not in text


def test_a_line_carries_its_stage_and_instance(console: Console) -> None:
    get_logger("busllm.test", stage="tokenizer", instance="tokenizer-0-aaaaaaaa").info("ready")
    text = console.getvalue()
    assert "tokenizer-0-aaaaaaaa" in text
    if not console.isatty():
        line = json.loads(text)
        assert (line["event"], line["stage"], line["level"]) == ("ready", "tokenizer", "info")
