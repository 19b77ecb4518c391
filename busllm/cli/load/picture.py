"""A load as a picture: one SVG that needs nothing else, and a page around it.

Owns: three panels: the distributions of the time to the first text and between two, and the output over time.
Does not know: where it is written (`cli/bench.py`).
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import msgspec

from busllm.cli.load.report import Report, inter_tokens_ms, ttfts_ms
from busllm.cli.load.run import Run

_PANEL_WIDTH, _PANEL_HEIGHT = 420, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 40, 48
_MAX_POINTS = 400
_NUM_TICKS = 5
_NUM_SLICES = 60
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.title{font-weight:600;font-size:13px}"
    ".axis{stroke:#888;fill:none}.grid{stroke:#e4e4e4}.line{stroke:#2364aa;fill:none;stroke-width:1.8}"
    ".mark{stroke:#c1440e;stroke-dasharray:3 3}"
)

Point = tuple[float, float]


class Panel(msgspec.Struct, frozen=True):
    """One diagram.

    Attributes:
        points: of the line, in ascending x.
        marks: vertical lines with a word each.
    """

    title: str
    x_label: str
    y_label: str
    points: tuple[Point, ...]
    marks: tuple[tuple[float, str], ...] = ()


def panels_of(run: Run, report: Report) -> list[Panel]:
    """The diagrams of a run; one without data is left out."""
    panels = []
    for title, values, known in (
        ("Time to first text", ttfts_ms(run), report.ttft_ms),
        ("Between two pieces of text", inter_tokens_ms(run), report.inter_token_ms),
    ):
        if known is not None:
            marks = ((known.p50, "p50"), (known.p99, "p99"))
            panels.append(Panel(title, "ms", "% of all at or below", _distribution(values), marks))
    output = _output_over_time(run)
    if output:
        panels.append(Panel("Output", "s since the first request", "pieces of text / s", output))
    return panels


def _distribution(ascending: Sequence[float]) -> tuple[Point, ...]:
    step = max(1, len(ascending) // _MAX_POINTS)
    kept = sorted({*range(0, len(ascending), step), len(ascending) - 1})
    return tuple((ascending[index], 100 * (index + 1) / len(ascending)) for index in kept)


def _output_over_time(run: Run) -> tuple[Point, ...]:
    times = [time_s - run.began_s for one in run.measured for time_s in one.text_s]
    if not times:
        return ()
    slice_s = (run.ended_s - run.began_s) / _NUM_SLICES
    counts = [0] * _NUM_SLICES
    for time_s in times:
        counts[min(_NUM_SLICES - 1, int(time_s / slice_s))] += 1
    return tuple(((number + 0.5) * slice_s, count / slice_s) for number, count in enumerate(counts))


# ------------------------------------------------------------ drawing


def svg(panels: Sequence[Panel], title: str) -> str:
    """The panels side by side."""
    width, height = max(1, len(panels)) * _PANEL_WIDTH, _PANEL_HEIGHT + _TOP
    drawn = "".join(f'<g transform="translate({i * _PANEL_WIDTH},{_TOP})">{_draw(p)}</g>' for i, p in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{_STYLE}</style>"
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text x="{_LEFT}" y="22" class="title">{html.escape(title)}</text>{drawn}</svg>'
    )


def _draw(panel: Panel) -> str:
    inner_width, inner_height = _PANEL_WIDTH - _LEFT - _RIGHT, _PANEL_HEIGHT - _BOTTOM - _TOP
    x_max = _rounded_up(max(x for x, _ in panel.points))
    y_max = _rounded_up(max(y for _, y in panel.points))

    def at(x: float, y: float) -> tuple[float, float]:
        return round(_LEFT + x / x_max * inner_width, 1), round(_TOP + (1 - y / y_max) * inner_height, 1)

    parts = [f'<text x="{_LEFT}" y="{_TOP - 16}" class="title">{html.escape(panel.title)}</text>']
    bottom, top = _TOP + inner_height, _TOP
    for number in range(_NUM_TICKS + 1):
        x, y = at(x_max * number / _NUM_TICKS, y_max * number / _NUM_TICKS)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + inner_width}" y1="{y}" y2="{y}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_tick(y_max * number / _NUM_TICKS)}</text>')
        parts.append(
            f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{_tick(x_max * number / _NUM_TICKS)}</text>'
        )
    for value, word in panel.marks:
        x, _ = at(min(value, x_max), 0)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" class="mark"/>')
        side = f'x="{x - 3}" text-anchor="end"' if value > x_max / 2 else f'x="{x + 3}"'
        parts.append(f'<text {side} y="{bottom - 8}">{word} {value:g}</text>')
    line = " ".join("{},{}".format(*at(x, y)) for x, y in panel.points)
    parts.append(f'<polyline points="{line}" class="line"/>')
    parts.append(f'<path d="M{_LEFT} {top}V{bottom}H{_LEFT + inner_width}" class="axis"/>')
    middle = _LEFT + inner_width / 2
    parts.append(f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">{html.escape(panel.x_label)}</text>')
    y_at = f'x="14" y="{_TOP + inner_height / 2}" transform="rotate(-90 14 {_TOP + inner_height / 2})"'
    parts.append(f'<text {y_at} text-anchor="middle">{html.escape(panel.y_label)}</text>')
    return "".join(parts)


def _rounded_up(value: float) -> float:
    """The next number of few digits, so that a fifth of it reads well."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power * 10 < value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * factor for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10) if power * factor >= value)


def _tick(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:.4g}"


def page(picture: str, title: str, rows: Sequence[tuple[str, str]]) -> str:
    """An HTML page with the figures and the picture, without scripts and without anything from elsewhere."""
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>"
        "body{font:15px system-ui,sans-serif;margin:2rem;color:#222}"
        "table{border-collapse:collapse;margin-bottom:1.5rem}"
        "th,td{text-align:left;padding:.2rem .8rem .2rem 0;border-bottom:1px solid #ddd;font-weight:normal}"
        "th{color:#666}svg{max-width:100%;height:auto}"
        f"</style></head><body><h1>{html.escape(title)}</h1><table>{cells}</table>{picture}</body></html>\n"
    )
