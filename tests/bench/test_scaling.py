"""The curves of how busllm grows: measured, drawn, written down."""

from __future__ import annotations

import xml.etree.ElementTree
from pathlib import Path

import pytest

from bench.compare.machine import this_machine
from bench.scaling import buses, planner, prefix_cache, stages
from bench.scaling.__main__ import main
from bench.scaling.figure import Curve, Figure, Results, curves, load, save, table
from bench.scaling.plot import svg

FIGURE = Figure(
    name="made",
    title="Made up & drawn",
    x_label="things",
    y_label="µs",
    curves=(Curve("flat", ((10, 2.0), (100, 2.1), (1000, 2.05))), Curve("steep", ((10, 1.0), (1000, 100.0)))),
)
SVG = "{http://www.w3.org/2000/svg}"


def test_every_curve_is_measured_at_every_x() -> None:
    made = curves(("twice", "square"), (1, 2, 3), lambda x: (2.0 * x, float(x * x)))
    assert made == (Curve("twice", ((1, 2.0), (2, 4.0), (3, 6.0))), Curve("square", ((1, 1.0), (2, 4.0), (3, 9.0))))


def test_a_table_has_a_row_for_each_x_and_a_gap_where_nothing_was_measured() -> None:
    assert table(FIGURE).splitlines() == [
        "| things | flat | steep |",
        "| ---: | ---: | ---: |",
        "| 10 | 2 | 1 |",
        "| 100 | 2.1 |  |",
        "| 1,000 | 2.05 | 100 |",
    ]


@pytest.mark.parametrize("log_y", [False, True])
def test_a_plot_is_one_file_with_every_point_inside_its_frame(log_y: bool) -> None:
    figure = Figure(**{name: getattr(FIGURE, name) for name in Figure.__struct_fields__} | {"log_y": log_y})
    drawn = xml.etree.ElementTree.fromstring(svg(figure))
    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in drawn.iter(f"{SVG}circle")]
    assert len(dots) == 5
    assert all(0 < x < width and 0 < y < height for x, y in dots)
    flat, steep = (line.attrib["points"].split() for line in drawn.iter(f"{SVG}polyline"))
    assert float(flat[0].split(",")[0]) == float(steep[0].split(",")[0])
    assert float(steep[1].split(",")[1]) < float(flat[2].split(",")[1]), "more is higher"
    words = "".join(drawn.itertext())
    assert all(word in words for word in ("Made up & drawn", "things", "µs", "flat", "steep", "prefers-color-scheme"))
    assert "http" not in words


def test_what_is_measured_takes_its_place_among_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prefix_cache, "CACHED_TOKENS", (5_000, 10_000))
    save(Results({"made": (this_machine(), FIGURE)}), tmp_path / "figures.json")
    main(["--only", "prefix_cache", "--out", str(tmp_path)])
    figures = load(tmp_path / "figures.json").figures
    assert figures["made"][1] == FIGURE
    assert [len(curve.points) for curve in figures["prefix_cache"][1].curves] == [2] * 6
    assert table(figures["prefix_cache"][1]) in capsys.readouterr().out
    page = (tmp_path / "README.md").read_text()
    assert all(f"({name}.svg)" in page and table(figure) in page for name, (_, figure) in figures.items())
    assert svg(figures["prefix_cache"][1]) == (tmp_path / "prefix_cache.svg").read_text()


@pytest.mark.slow
def test_engine_stages_and_buses_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "WAITING", (1, 2))
    monkeypatch.setattr(planner, "CACHE_TOKENS", 200_000)
    monkeypatch.setattr(stages, "OPEN_REQUESTS", (10, 20))
    monkeypatch.setattr(stages, "NUM_STAGES", (4, 8))
    monkeypatch.setattr(buses, "SUBSCRIPTIONS", (10, 20))
    monkeypatch.setattr(buses, "STAGES", (3, 5))
    monkeypatch.setattr(buses, "NUM_MESSAGES", 1_000)
    main(["--only", "planner", "stages", "buses", "--out", str(tmp_path)])
    figures = load(tmp_path / "figures.json").figures
    assert len(figures) == 7
    assert all(y >= 0 for _, figure in figures.values() for curve in figure.curves for _, y in curve.points)
