"""A comparison as one HTML page, which needs nothing else.

Owns: what stands on it, in which order, and its colours for light and dark.
Does not know: the arithmetic (`summary.py`), the drawing of bars (`bars.py`).
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import groupby

from bench.compare.bars import Bar, bars
from bench.compare.results import Comparison
from bench.compare.summary import Line, Outcome, Verdict, lines_of, noisy_visits, verdicts_of
from bench.compare.text_table import number_text, spread_text

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1d2329;--quiet:#5c6670;--rule:#d9dee3;--ours:#1f6fb5;--other:#9aa5af;
--round:#1d2329;--good:#1a7f45;--bad:#b3372b}
@media (prefers-color-scheme:dark){:root{--paper:#15191d;--ink:#e4e8ec;--quiet:#9ba6b1;--rule:#333b43;--ours:#4f9fe3;
--other:#5f6b76;--round:#f2f5f7;--good:#5fc58a;--bad:#ec8074}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:76rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.6rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin:2.2rem 0 .4rem}p,.note{color:var(--quiet)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.25rem 1.1rem .25rem 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--quiet);font-weight:500}td.number,th.number{text-align:right;white-space:nowrap}
.good{color:var(--good)}.bad{color:var(--bad)}.plots{display:flex;flex-wrap:wrap;gap:.5rem 2rem}
figure{margin:.6rem 0;flex:1 1 26rem;max-width:34rem}figcaption{color:var(--quiet);font-size:.87rem}
svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .absent{fill:var(--quiet)}
.axis{stroke:var(--rule)}.ours{fill:var(--ours)}.other{fill:var(--other)}.range{stroke:var(--round)}
.round{fill:var(--paper);stroke:var(--round)}
"""
_TITLE = "busllm beside other servers"
_PLOTS_PER_ROW = 5  # all but the CPU time


def page(comparison: Comparison) -> str:
    """The whole page."""
    lines = lines_of(comparison)
    sections = [
        f"<h1>{_TITLE}</h1>",
        f"<p>{_text(comparison.model)}, begun {_text(comparison.began_at)}. Medians over the rounds.</p>",
        _goals(verdicts_of(comparison, lines)),
        *(_row(comparison, list(group)) for _, group in groupby(lines, key=lambda line: line.row.key)),
        _doubts(comparison),
        _servers(comparison),
        _machine(comparison),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_TITLE}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


# ------------------------------------------------------------ sections


def _goals(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    head = ("row", "figure", "ours", "compared with", "reached", "goal", "aim", "")
    rows = []
    for verdict in verdicts:
        goal, is_ratio = verdict.goal, verdict.against is not None
        sign = "≥" if goal.figure.more_is_better else "≤"
        unit = " ×" if is_ratio else f" {goal.figure.unit}"
        colour = "bad" if verdict.outcome is Outcome.MISSED else "good"
        cells = [_text(verdict.row.key), _text(goal.figure.title), _text(verdict.server), _text(verdict.against or "–")]
        numbers = (f"{verdict.reached:.2f}{unit}", f"{sign} {goal.limit:g}", f"{sign} {goal.aim:g}")
        row = "".join(map(_cell, cells)) + "".join(map(_number_cell, numbers))
        rows.append(f'{row}<td class="{colour}">{verdict.outcome.value}</td>')
    return f"<h2>Goals</h2>{_table(head, rows, numeric=(4, 5, 6))}"


def _row(comparison: Comparison, lines: Sequence[Line]) -> str:
    plots = [
        bars(
            line.figure.title,
            line.figure.unit,
            [Bar(server.name, line.spreads.get(server.name), server.is_ours) for server in comparison.servers],
        )
        for line in lines[:_PLOTS_PER_ROW]
        if line.spreads
    ]
    notes = "".join(
        f'<p class="note">{_text(name)}: {_text(note)}</p>' for name, note in sorted(lines[0].notes.items())
    )
    return (
        f"<h2>{_text(lines[0].title)}</h2><div class='plots'>{''.join(plots)}</div>{_figures(comparison, lines)}{notes}"
    )


def _figures(comparison: Comparison, lines: Sequence[Line]) -> str:
    """Every figure, and the ratio of the first of ours to each of the others."""
    names = [server.name for server in comparison.servers]
    ours = [server.name for server in comparison.servers if server.is_ours]
    others = [server.name for server in comparison.servers if not server.is_ours]
    ratios = [(own, other) for own in ours for other in others]
    head = ("figure", *names, *(f"{own} / {other}" for own, other in ratios))
    rows = [
        _cell(f"{_text(line.figure.title)}, {line.figure.unit}")
        + "".join(_number_cell(spread_text(line.spreads.get(name))) for name in names)
        + "".join(_number_cell(_ratio_text(line.ratio(own, other))) for own, other in ratios)
        for line in lines
    ]
    return _table(head, rows, numeric=range(1, len(head)))


def _doubts(comparison: Comparison) -> str:
    noisy, errors = noisy_visits(comparison), comparison.errors
    sections = []
    if noisy:
        sections.append(
            f"<h2>Other programs were at work</h2><p>Cores that neither the server nor the load generator kept busy: "
            f"{_text('; '.join(noisy))}.</p>"
        )
    if errors:
        sections.append(f"<h2>Failed</h2>{''.join(f'<p>{_text(error)}</p>' for error in errors)}")
    return "".join(sections)


def _servers(comparison: Comparison) -> str:
    rows = [
        "".join(map(_cell, map(_text, (server.name, server.version, server.weights, server.settings))))
        + _number_cell(f"{server.kv_tokens:,}")
        for server in comparison.servers
    ]
    return f"<h2>Servers</h2>{_table(('name', 'version', 'weights', 'settings', 'KV tokens'), rows, numeric=(4,))}"


def _machine(comparison: Comparison) -> str:
    machine = comparison.machine
    loads = ", ".join(f"{visit.server} {visit.load_before:g}" for visit in comparison.visits)
    facts = (
        ("CPU", f"{machine.cpu}, {machine.num_cores} cores"),
        ("instructions", " ".join(machine.flags)),
        ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        ("kernel", machine.kernel),
        ("versions", ", ".join(f"{name} {found}" for name, found in machine.versions.items())),
        ("commit", machine.commit or "not known"),
        ("load before each turn", loads),
    )
    rows = [f"<th>{_text(name)}</th>{_cell(_text(value))}" for name, value in facts]
    return f"<h2>Machine</h2>{_table((), rows)}"


# ------------------------------------------------------------ pieces


def _table(head: Sequence[str], rows: Iterable[str], numeric: Iterable[int] = ()) -> str:
    right = set(numeric)
    cells = "".join(
        f'<th class="number">{_text(name)}</th>' if number in right else f"<th>{_text(name)}</th>"
        for number, name in enumerate(head)
    )
    top = f"<tr>{cells}</tr>" if head else ""
    return f"<div class='wide'><table>{top}{''.join(f'<tr>{row}</tr>' for row in rows)}</table></div>"


def _cell(content: str) -> str:
    return f"<td>{content}</td>"


def _number_cell(text: str) -> str:
    return f'<td class="number">{_text(text)}</td>'


def _ratio_text(ratio: float | None) -> str:
    return "–" if ratio is None else f"{number_text(ratio)} ×"


def _text(value: str) -> str:
    return html.escape(value)
