"""The table of the comparison is the one that is measured."""

from __future__ import annotations

from bench.compare.rows import ROWS, Goal
from tests.docs.pages import code, read, sections, table

ROWS_OF_PAGE = table(sections(read("performance.md"))["How to compare"])


def bounds(goal: Goal) -> str:
    """A goal's numbers, as the page writes them."""
    return f"{'≥' if goal.figure.more_is_better else '≤'} {goal.limit:g} ({goal.aim:g})"


def test_every_row_is_on_the_page_in_the_order_in_which_it_runs() -> None:
    assert [code(row["row"]) for row in ROWS_OF_PAGE] == [row.key for row in ROWS]


def test_every_goal_is_on_the_page_with_what_it_is_compared_with() -> None:
    for row, shown in zip(ROWS, ROWS_OF_PAGE, strict=True):
        goals = [] if shown["goal (aim)"] == "–" else shown["goal (aim)"].split("; ")
        assert len(goals) == len(row.goals), row.key
        for goal, text in zip(row.goals, goals, strict=True):
            assert bounds(goal) in text
            against = goal.peer or (f"its own `{goal.row}`" if goal.row is not None else goal.figure.unit)
            assert text.endswith(against)


def test_loads_are_those_of_the_page() -> None:
    for row, shown in zip(ROWS, ROWS_OF_PAGE, strict=True):
        if row.workload is None:
            assert shown["load"].startswith("none")
        elif "as `" not in shown["load"] and "likewise" not in shown["load"] and row.requests_of is None:
            assert f"{row.workload.requests} requests" in shown["load"]
            assert f"{row.workload.output_tokens} tokens out" in shown["load"]
