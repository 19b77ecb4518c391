"""Measured curves, as numbers and as a Markdown table.

Owns: the form in which all measurements of this folder come.
Does not know: how anything is measured, how it is drawn (`plot.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.compare.results import Machine


class Curve(msgspec.Struct, frozen=True):
    """One line: (x, y) in ascending x."""

    name: str
    points: tuple[tuple[float, float], ...]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Curves over one quantity.

    Attributes:
        name: of its file.
        title, x_label, y_label: for people.
        curves: the same x in all of them, or fewer.
        log_y: whether its values are too far apart for one linear axis.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    log_y: bool = False


class Results(msgspec.Struct, frozen=True):
    """Figures by name, each with the machine and the code that it was measured on."""

    figures: dict[str, tuple[Machine, Figure]] = {}


def curves(names: Sequence[str], xs: Sequence[int], measure: Callable[[int], Sequence[float]]) -> tuple[Curve, ...]:
    """Measures all curves at each x; `measure` gives one value per curve."""
    values = [tuple(measure(x)) for x in xs]
    return tuple(
        Curve(name, tuple((x, row[index]) for x, row in zip(xs, values, strict=True)))
        for index, name in enumerate(names)
    )


def table(figure: Figure) -> str:
    """Rows by x, one column per curve."""
    xs = sorted({x for curve in figure.curves for x, _ in curve.points})
    rows = [[figure.x_label, *(curve.name for curve in figure.curves)], ["---:"] * (1 + len(figure.curves))]
    for x in xs:
        found = (dict(curve.points).get(x) for curve in figure.curves)
        rows.append([f"{x:,.0f}", *("" if y is None else number_text(y) for y in found)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def number_text(value: float) -> str:
    """Three digits that mean something."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def load(path: Path) -> Results:
    """What was measured before; nothing when there is no such file."""
    return msgspec.json.decode(path.read_bytes(), type=Results) if path.exists() else Results()


def save(results: Results, path: Path) -> None:
    """Writes all figures, readable and in one order."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results, order="sorted"), indent=1) + b"\n")
