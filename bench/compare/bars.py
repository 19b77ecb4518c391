"""One figure of one row as bars, one for each server, in SVG.

Owns: the drawing. A bar ends at the median; a line spans the rounds and a dot marks each. Colours come from the page's
variables, so that the picture follows its light or dark scheme.
Does not know: what is drawn (`page.py` chooses).
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import msgspec

from bench.compare.summary import Spread
from bench.compare.text_table import number_text

_WIDTH, _LABEL, _VALUE = 460, 104, 84
_BAR, _GAP, _TOP = 18, 10, 8
_DOT_RADIUS = 2.5


class Bar(msgspec.Struct, frozen=True):
    """One server.

    Attributes:
        label: its name.
        spread: its figure; None = not measured.
        is_ours: decides the colour.
    """

    label: str
    spread: Spread | None
    is_ours: bool


def bars(title: str, unit: str, drawn: Sequence[Bar]) -> str:
    """The bars below each other, all on one scale from 0."""
    most = max((bar.spread.most for bar in drawn if bar.spread is not None), default=0.0) or 1.0
    height = _TOP + len(drawn) * (_BAR + _GAP)
    parts = [_bar(bar, _TOP + number * (_BAR + _GAP), most) for number, bar in enumerate(drawn)]
    name = html.escape(f"{title}, {unit}")
    return (
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{name}">'
        f'<line class="axis" x1="{_LABEL}" x2="{_LABEL}" y1="0" y2="{height}"/>{"".join(parts)}</svg></figure>'
    )


def _bar(bar: Bar, top: float, most: float) -> str:
    middle = top + _BAR / 2
    label = f'<text x="{_LABEL - 8}" y="{middle + 4}" text-anchor="end">{html.escape(bar.label)}</text>'
    if bar.spread is None:
        return f'{label}<text class="absent" x="{_LABEL + 8}" y="{middle + 4}">not measured</text>'

    def at(value: float) -> float:
        return round(_LABEL + value / most * (_WIDTH - _LABEL - _VALUE), 1)

    spread, end = bar.spread, at(bar.spread.median)
    kind = "ours" if bar.is_ours else "other"
    parts = [label, f'<rect class="{kind}" x="{_LABEL}" y="{top}" width="{end - _LABEL:.1f}" height="{_BAR}" rx="2"/>']
    if len(spread.values) > 1:
        parts.append(
            f'<line class="range" x1="{at(spread.least)}" x2="{at(spread.most)}" y1="{middle}" y2="{middle}"/>'
        )
        parts += [
            f'<circle class="round" cx="{at(value)}" cy="{middle}" r="{_DOT_RADIUS}"/>' for value in spread.values
        ]
    beside = max(end, at(spread.most)) + 8
    parts.append(f'<text class="value" x="{beside:.1f}" y="{middle + 4}">{number_text(spread.median)}</text>')
    return "".join(parts)
