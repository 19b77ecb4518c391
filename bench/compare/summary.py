"""From single measurements to what is shown: medians, how far the rounds lie apart, ratios, goals.

Owns: the arithmetic.
Does not know: how it is shown (`text_table.py`, `page.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from enum import Enum

import msgspec

from bench.compare.results import Comparison, ServerFacts
from bench.compare.rows import ROWS, Figure, Goal, Row

NOISE_LIMIT = 0.1  # cores that somebody else kept busy, above which a measurement says little


class Outcome(Enum):
    """What became of a goal."""

    MISSED = "missed"
    REACHED = "reached"
    AIM_REACHED = "aim reached"


class Spread(msgspec.Struct, frozen=True):
    """One figure of one server over the rounds.

    Attributes:
        values: of the rounds that have it, in their order.
    """

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one; of an even number the mean of the middle two."""
        return statistics.median(self.values)

    @property
    def least(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def most(self) -> float:
        """The largest."""
        return max(self.values)


class Line(msgspec.Struct, frozen=True):
    """One figure of one row, for all servers.

    Attributes:
        spreads: by the server's name; a server without a single value is left out.
        notes: why a server is left out, by its name.
    """

    row: Row
    title: str
    figure: Figure
    spreads: dict[str, Spread]
    notes: dict[str, str]

    def ratio(self, server: str, to: str) -> float | None:
        """Median by median; None when one of them is not there."""
        return quotient(self.spreads.get(server), self.spreads.get(to))


class Verdict(msgspec.Struct, frozen=True):
    """A goal and how near one of our configurations came.

    Attributes:
        server: ours.
        against: what it is compared with, for people; None = the figure itself counts.
        reached: the ratio, or the figure itself.
    """

    row: Row
    goal: Goal
    server: str
    against: str | None
    reached: float
    outcome: Outcome


def lines_of(comparison: Comparison) -> list[Line]:
    """Everything that was measured, in the order of the table."""
    titles = {facts.key: facts.title for facts in comparison.rows}
    return [
        Line(
            row=row,
            title=titles[row.key],
            figure=figure,
            spreads=_spreads(comparison, row.key, figure),
            notes=_notes(comparison, row.key),
        )
        for row in ROWS
        if row.key in titles
        for figure in row.figures
    ]


def _spreads(comparison: Comparison, key: str, figure: Figure) -> dict[str, Spread]:
    values: dict[str, list[float]] = {}
    for visit in comparison.visits:
        result = visit.rows.get(key)
        if result is not None and figure.value in result.figures:
            values.setdefault(visit.server, []).append(result.figures[figure.value])
    return {server: Spread(tuple(found)) for server, found in values.items()}


def _notes(comparison: Comparison, key: str) -> dict[str, str]:
    notes = {}
    for visit in comparison.visits:
        result = visit.rows.get(key)
        note = visit.error if result is None else result.left_out or result.error
        if note is not None:
            notes[visit.server] = note
    return notes


def quotient(ours: Spread | None, theirs: Spread | None) -> float | None:
    """Median by median; None when one of them is not there or nothing can be divided by it."""
    if ours is None or theirs is None or theirs.median == 0:
        return None
    return ours.median / theirs.median


def verdicts_of(comparison: Comparison, lines: Sequence[Line]) -> list[Verdict]:
    """Every goal for each of our configurations, where both sides were measured."""
    ours = [server for server in comparison.servers if server.is_ours]
    by_key = {(line.row.key, line.figure): line for line in lines}
    verdicts = []
    for line in lines:
        for goal in line.row.goals:
            if goal.figure is not line.figure:
                continue
            for server in ours:
                verdict = _verdict(line, goal, server, by_key.get((goal.row or "", goal.figure)))
                if verdict is not None:
                    verdicts.append(verdict)
    return verdicts


def _verdict(line: Line, goal: Goal, server: ServerFacts, other_line: Line | None) -> Verdict | None:
    own = line.spreads.get(server.name)
    against: str | None
    if goal.peer is not None:
        reached, against = quotient(own, line.spreads.get(goal.peer)), goal.peer
    elif goal.row is not None:
        other = other_line.spreads.get(server.name) if other_line is not None else None
        reached, against = quotient(own, other), f"its own {goal.row}"
    else:
        reached, against = (own.median if own is not None else None), None
    if reached is None:
        return None
    return Verdict(line.row, goal, server.name, against, reached, outcome_of(goal, reached))


def outcome_of(goal: Goal, reached: float) -> Outcome:
    """Compares a ratio, or a figure, with a goal."""
    sign = 1 if goal.figure.more_is_better else -1
    if sign * reached < sign * goal.limit:
        return Outcome.MISSED
    return Outcome.AIM_REACHED if sign * reached >= sign * goal.aim else Outcome.REACHED


def noisy_visits(comparison: Comparison) -> list[str]:
    """Measurements during which other programs were at work, with how many cores they kept busy."""
    return [
        f"{visit.server}, round {visit.round_number}, {key}: {result.other_busy:.2f} cores"
        for visit in comparison.visits
        for key, result in visit.rows.items()
        if result.other_busy is not None and result.other_busy > NOISE_LIMIT
    ]
