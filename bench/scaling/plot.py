"""A figure as one SVG file that needs nothing else and follows the reader's light or dark scheme.

Owns: the drawing. The x axis is logarithmic: what grows here grows by powers of ten, or doubles.
Does not know: what is drawn.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from bench.scaling.figure import Figure, number_text

_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 40, 52, 58
_LEGEND_LINE = 18
_MAX_TICKS = 6
_COLOURS = (("#1f6feb", "#6cb6ff"), ("#c2410c", "#ff9d5c"), ("#15803d", "#5fd38a"), ("#7e22ce", "#cf9bff"),
            ("#b91c1c", "#ff8f8f"), ("#0e7490", "#5fd7ee"))  # fmt: skip
_LIGHT = ".back{fill:#fff}text{fill:#24292f}.grid{stroke:#d8dee4}.axis{stroke:#57606a}"
_DARK = ".back{fill:#0d1117}text{fill:#e6edf3}.grid{stroke:#30363d}.axis{stroke:#8b949e}"

Scale = Callable[[float], float]


def svg(figure: Figure) -> str:
    """Draws all curves with a legend below."""
    legend_height = _LEGEND_LINE * len(figure.curves)
    height = _HEIGHT + legend_height
    xs = [x for curve in figure.curves for x, _ in curve.points]
    ys = [y for curve in figure.curves for _, y in curve.points]
    x_at = _logarithmic(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    y_ticks, y_at = _vertical(ys, figure.log_y)
    parts = [
        f'<rect class="back" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="24">{html.escape(figure.title)}</text>',
        f'<text x="{_LEFT}" y="{_TOP - 10}">{html.escape(figure.y_label)}</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 14}" text-anchor="end">{html.escape(figure.x_label)}</text>',
        *_axes(sorted(set(xs)), x_at, y_ticks, y_at),
    ]
    for index, curve in enumerate(figure.curves):
        points = [(round(x_at(x), 1), round(y_at(y), 1)) for x, y in curve.points]
        parts.append(_line(index, points))
        y = _HEIGHT + _LEGEND_LINE * index
        parts.append(f'<line class="line c{index}" x1="{_LEFT}" x2="{_LEFT + 26}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT + 34}" y="{y + 4}">{html.escape(curve.name)}</text>')
    label = html.escape(figure.title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{label}"><style>{_style(len(figure.curves))}</style>{"".join(parts)}</svg>\n'
    )


def _style(num_curves: int) -> str:
    def colours(index: int) -> str:
        return "".join(
            f".line.c{n}{{stroke:{_COLOURS[n % len(_COLOURS)][index]}}}"
            f".dot.c{n}{{fill:{_COLOURS[n % len(_COLOURS)][index]}}}"
            for n in range(num_curves)
        )

    return (
        "text{font:12px system-ui,sans-serif}.title{font-size:15px;font-weight:600}.line{fill:none;stroke-width:2}"
        f"{_LIGHT}{colours(0)}@media (prefers-color-scheme:dark){{{_DARK}{colours(1)}}}"
    )


def _line(index: int, points: Sequence[tuple[float, float]]) -> str:
    dots = "".join(f'<circle class="dot c{index}" cx="{x}" cy="{y}" r="3"/>' for x, y in points)
    return f'<polyline class="line c{index}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>{dots}'


def _axes(xs: Sequence[float], x_at: Scale, y_ticks: Sequence[float], y_at: Scale) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value in y_ticks:
        y = round(y_at(value), 1)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{number_text(value)}</text>')
    for value in xs:
        x = round(x_at(value), 1)
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{value:,.0f}</text>')
    parts.append(f'<path class="axis" fill="none" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
    return parts


def _logarithmic(least: float, most: float, first: float, last: float) -> Scale:
    span = math.log(most / least) or 1.0
    return lambda value: first + math.log(value / least) / span * (last - first)


def _vertical(ys: Sequence[float], is_logarithmic: bool) -> tuple[list[float], Scale]:
    bottom = _HEIGHT - _BOTTOM
    if is_logarithmic:
        least, most = 10.0 ** math.floor(math.log10(min(ys))), 10.0 ** math.ceil(math.log10(max(ys)))
        most = max(most, 10 * least)
        num_decades = round(math.log10(most / least))
        return [least * 10**n for n in range(num_decades + 1)], _logarithmic(least, most, bottom, _TOP)
    step = _tick_step(max(ys))
    ticks = [step * n for n in range(math.ceil(max(ys) / step) + 1)]
    return ticks, lambda value: bottom - value / ticks[-1] * (bottom - _TOP)


def _tick_step(most: float) -> float:
    """1, 2 or 5 times a power of ten, so that few ticks reach `most`."""
    power = 10.0 ** math.floor(math.log10(most / _MAX_TICKS))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * _MAX_TICKS >= most)
