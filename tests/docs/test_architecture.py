"""The table of bounds is what the code has; engine options that the pages name exist."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import msgspec
import pytest

import busllm
from busllm.actors.clock import Timings
from busllm.bus.queue import QueueBounds
from busllm.bus.retry import RetryTimings
from busllm.engine.config import BUILT_IN_ATTENTIONS
from busllm.engine.models.config import SUPPORTED_ARCHITECTURES
from busllm.engine.options import EngineOptions
from busllm.engine.step_budget import FIRST_TOKENS, LEAST_TOKENS, MOST_TOKENS
from busllm.stages.frontend.settings import HttpTimings
from busllm.stages.scheduler.build_engine import AUTO_PAGE_TOKENS
from busllm.topology.config import DEFAULT_KV_TOKENS
from busllm.topology.restarts import RestartTimings
from busllm.topology.supervise import SupervisionTimings
from tests.docs.pages import code, read, sections, table

BOUNDED = (QueueBounds, Timings, RetryTimings, HttpTimings, SupervisionTimings, RestartTimings)
NO_BOUNDS = {"messages.codec.MAX_NUMBER", "sampling.MAX_SEED"}  # ranges of numbers
PLACES = ("actors", "bus", "client", "messages", "requests", "sampling", "stages", "telemetry")


def constants() -> dict[str, float]:
    """Every public `MAX_…` of the parts that serve requests."""
    found: dict[str, float] = {}
    for info in pkgutil.walk_packages(busllm.__path__, "busllm."):
        if info.name.split(".")[1] in PLACES:
            module = importlib.import_module(info.name)
            source = inspect.getsource(module)
            for name, value in vars(module).items():
                if name.startswith("MAX_") and f"\n{name} = " in source:
                    found[f"{info.name.removeprefix('busllm.')}.{name}"] = value
    return found


def durations() -> dict[str, float]:
    """Every field of the tables of bounds that is a number."""
    return {
        f"{type_.__name__}.{field.name}": field.default
        for type_ in BOUNDED
        for field in msgspec.structs.fields(type_)
        if isinstance(field.default, int | float)
    }


def test_every_bound_is_in_the_table_with_its_default() -> None:
    documented = {
        code(row["bound"]): float(row["default"]) for row in table(sections(read("architecture.md"))["Bounds"])
    }
    actual = {name: value for name, value in (constants() | durations()).items() if name not in NO_BOUNDS}
    assert documented == actual


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("engine.md", SUPPORTED_ARCHITECTURES),
        ("engine.md", tuple(f"`{name}`" for name in EngineOptions.__struct_fields__)),
        ("reference/settings.md", BUILT_IN_ATTENTIONS),
        (
            "reference/settings.md",
            (
                str(DEFAULT_KV_TOKENS),
                f"`auto`: {AUTO_PAGE_TOKENS}",
                f"({FIRST_TOKENS} at first, {LEAST_TOKENS} to {MOST_TOKENS:,})",
            ),
        ),
    ],
)
def test_what_the_pages_say_is_built_in_is_what_there_is(page: str, words: tuple[str, ...]) -> None:
    assert all(word in read(page) for word in words)
