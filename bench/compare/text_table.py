"""A comparison in a terminal.

Owns: the table of figures and the list of goals, as text.
Does not know: the arithmetic (`summary.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from bench.compare.results import Comparison
from bench.compare.summary import Line, Spread, Verdict, lines_of, noisy_visits, verdicts_of
from busllm.cli.terminal import print_aligned

_SEPARATE = "–"
_ANY_WIDTH = 10_000


def show(comparison: Comparison, console: Console) -> None:
    """Prints all of it."""
    lines = lines_of(comparison)
    for table in _tables(comparison, lines, console):
        print_aligned(console, table)
    console.print("median (least–most of the rounds)")
    verdicts = verdicts_of(comparison, lines)
    if verdicts:
        console.print()
        print_aligned(console, _goals(verdicts))
    noisy = noisy_visits(comparison)
    if noisy:
        console.print(f"\nOther programs were at work in {len(noisy)} measurements; the worst: {_worst(noisy)}")
    for error in comparison.errors:
        console.print(f"failed: {error}", soft_wrap=True)


def _tables(comparison: Comparison, lines: list[Line], console: Console) -> Iterator[Table]:
    """All servers, as many in one table as the terminal is wide, at least one."""
    names: list[str] = []
    any_width = console.options.update(width=_ANY_WIDTH)
    for server in comparison.servers:
        wider = console.measure(_figures(lines, [*names, server.name]), options=any_width)
        if names and wider.maximum > console.width:
            yield _figures(lines, names)
            names = []
        names.append(server.name)
    yield _figures(lines, names)


def _figures(lines: list[Line], names: list[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("row")
    table.add_column("figure")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    shown = None
    for line in lines:
        cells = [spread_text(line.spreads.get(name)) for name in names]
        table.add_row(line.row.key if line.row.key != shown else "", f"{line.figure.title}, {line.figure.unit}", *cells)
        shown = line.row.key
    return table


def _goals(verdicts: list[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("row")
    table.add_column("figure")
    table.add_column("ours", min_width=max(len(verdict.server) for verdict in verdicts))
    table.add_column("compared with")
    table.add_column("reached", justify="right")
    table.add_column("goal", justify="right")
    table.add_column("aim", justify="right")
    table.add_column("")
    for verdict in verdicts:
        goal = verdict.goal
        against, unit = verdict.against or _SEPARATE, "×" if verdict.against is not None else f" {goal.figure.unit}"
        sign = "≥" if goal.figure.more_is_better else "≤"
        table.add_row(
            verdict.row.key,
            goal.figure.title,
            verdict.server,
            against,
            f"{verdict.reached:.2f}{unit}",
            f"{sign} {goal.limit:g}",
            f"{sign} {goal.aim:g}",
            verdict.outcome.value,
        )
    return table


def spread_text(spread: Spread | None) -> str:
    """A figure over the rounds; the rounds' range only where there are several."""
    if spread is None:
        return _SEPARATE
    if len(spread.values) == 1:
        return number_text(spread.median)
    return f"{number_text(spread.median)} ({number_text(spread.least)}–{number_text(spread.most)})"


def number_text(value: float) -> str:
    """Three digits, or all of those before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _worst(noisy: list[str]) -> str:
    return max(noisy, key=lambda text: float(text.rsplit(" ", 2)[1]))
