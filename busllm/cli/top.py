"""`busllm top`: what every stage is doing now.

Owns: its flags, the table, token rates.
Does not know: how stages are heard (`busllm/client.py`).

A rate is the difference between two of a stage's own announcements over the time between their arrivals here.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import anyio
import msgspec
from rich.live import Live
from rich.table import Table

from busllm.cli.arguments import add_cluster_arguments
from busllm.cli.bus_client import run_with_client
from busllm.cli.terminal import console, print_aligned
from busllm.client import Client
from busllm.messages.control import Announcement

LOOK_EVERY_S = 0.1
REDRAW_EVERY_S = 0.5
ONCE_WAIT_S = 1.2  # two announcements are half a second apart
RATE_WINDOW_S = 3.0
_KINDS = ("frontend", "client", "tokenizer", "scheduler", "rank", "detokenizer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--once", action="store_true", help="print one table and end, as it does without a terminal")
    add_cluster_arguments(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Shows live stages with their state, host and process, queues, KV pages, tokens per second and forward pass."""
    return run_with_client(arguments, lambda client: _top(client, arguments.once))


async def _top(client: Client, once: bool) -> int:
    out = console()
    if once or not out.is_terminal:
        return await show_once(client)
    watched = Rates()
    with Live(console=out, auto_refresh=False, screen=True) as live:
        while True:
            live.update(table_of(await _stages(client), watched), refresh=True)
            await _look(client, watched, REDRAW_EVERY_S)


async def show_once(client: Client) -> int:
    """Looks for a moment and prints one table."""
    watched = Rates()
    await _look(client, watched, ONCE_WAIT_S)
    print_aligned(console(), table_of(await _stages(client), watched))
    return 0


async def _look(client: Client, watched: Rates, seconds: float) -> None:
    ends_at = anyio.current_time() + seconds
    while anyio.current_time() < ends_at:
        watched.look(await client.stages(), anyio.current_time())
        await anyio.sleep(LOOK_EVERY_S)


async def _stages(client: Client) -> list[Stage]:
    return [Stage(announced, client.is_silent(announced.instance)) for announced in await client.stages()]


class Stage(msgspec.Struct, frozen=True):
    """One line of the table."""

    announced: Announcement
    is_silent: bool


class Rates:
    """Tokens per second of every instance."""

    def __init__(self) -> None:
        self._heard: dict[str, Announcement] = {}
        self._samples: dict[str, deque[tuple[float, int]]] = {}

    def look(self, announced: Iterable[Announcement], now_s: float) -> None:
        """Takes what was announced last; what is the same object as before is the same announcement."""
        for one in announced:
            tokens = output_tokens(one.statistics)
            if tokens is None or self._heard.get(one.instance) is one:
                continue
            self._heard[one.instance] = one
            samples = self._samples.setdefault(one.instance, deque())
            samples.append((now_s, tokens))
            while now_s - samples[0][0] > RATE_WINDOW_S:
                samples.popleft()

    def of(self, instance: str) -> float | None:
        """Tokens per second over the last few seconds; None before the second announcement."""
        samples = self._samples.get(instance)
        if samples is None or len(samples) < 2:
            return None
        (began_s, first), (ended_s, last) = samples[0], samples[-1]
        return max(0, last - first) / (ended_s - began_s)


def output_tokens(statistics: Mapping[str, Any]) -> int | None:
    """How many tokens a stage has put out so far; None when it does not count them."""
    tokens = statistics.get("tokens")
    if isinstance(tokens, dict):
        tokens = tokens.get("output")
    return tokens if isinstance(tokens, int) else None


def table_of(stages: Sequence[Stage], rates: Rates) -> Table:
    """The table, in the order of the path."""
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    for name in ("state", "host"):
        table.add_column(name)
    for name in ("pid", "requests", "running", "waiting", "KV pages used", "cached", "total", "tok/s"):
        table.add_column(name, justify="right")
    table.add_column("computed by")
    for stage in sorted(stages, key=_place):
        one = stage.announced
        pages = one.statistics.get("kv_pages")
        pages = pages if isinstance(pages, dict) else {}
        rate = rates.of(one.instance)
        table.add_row(
            one.instance,
            _state(stage),
            one.host,
            str(one.pid),
            _number(one.load.get("requests")),
            *(_number(one.statistics.get(key)) for key in ("running", "waiting")),
            *(_number(pages.get(key)) for key in ("owned", "cached", "total")),
            "-" if rate is None else f"{rate:.1f}",
            _text(one.statistics.get("attention")),
        )
    return table


def _state(stage: Stage) -> str:
    if stage.is_silent:
        return "silent"
    progress = f": {stage.announced.progress}" if stage.announced.progress else ""
    return f"{stage.announced.state.value}{progress}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else "-"


def _number(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, int | float) else "-"


def _place(stage: Stage) -> tuple[int, int, str]:
    kind = stage.announced.kind
    return (_KINDS.index(kind) if kind in _KINDS else len(_KINDS), stage.announced.index, stage.announced.instance)
