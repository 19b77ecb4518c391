"""The page and the text of a comparison."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree
from html.parser import HTMLParser

import msgspec
from rich.console import Console

from bench.compare.bars import Bar, bars
from bench.compare.page import page
from bench.compare.results import Comparison
from bench.compare.summary import Spread
from bench.compare.text_table import number_text, show, spread_text
from busllm.cli.terminal import console
from tests.bench.made import KEYS, facts, made

VOID = {"meta"}


class Balance(HTMLParser):
    """Checks that every element is closed where it must be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_has_a_picture_of_every_row() -> None:
    reader = Balance()
    reader.feed(page(made()))
    assert reader.open == []
    assert reader.counts["svg"] == len(KEYS) + 1  # "c1" has two figures, the others one


def test_the_page_needs_nothing_from_elsewhere_and_follows_light_and_dark() -> None:
    text = page(made())
    assert not re.search(r"https?:|<script|<link|<img|url\(|@import", text)
    assert "prefers-color-scheme:dark" in text


def test_what_servers_say_is_shown_as_text() -> None:
    text = page(made())
    assert "it ended &amp; said &lt;why&gt;" in text
    assert "A &lt;CPU&gt;" in text
    assert "<why>" not in text


def test_the_page_has_goals_ratios_and_doubts() -> None:
    text = page(made())
    for expected in ("aim reached", "its own c8", "3 ×", "c8-sampled: 0.50 cores", "abc+", "avx512f", "llama 0.2"):
        assert expected in text


def test_bars_are_as_long_as_their_medians_and_show_every_round() -> None:
    svg = bars("output", "tok/s", [Bar("a", Spread((100.0, 200.0, 150.0)), True), Bar("b", None, False)])
    tree = xml.etree.ElementTree.fromstring(svg)
    [bar] = tree.iter("rect")
    rounds = [float(dot.attrib["cx"]) for dot in tree.iter("circle")]
    end = float(bar.attrib["x"]) + float(bar.attrib["width"])
    assert sorted(rounds)[1] == end  # the median is a round of three
    assert (min(rounds) - float(bar.attrib["x"])) * 2 == max(rounds) - float(bar.attrib["x"])
    assert "not measured" in svg


def test_numbers_have_three_digits_and_a_range_only_where_there_is_one() -> None:
    assert [number_text(value) for value in (1234.5, 99.96, 0.01234)] == ["1,234", "100", "0.0123"]
    assert spread_text(Spread((1.0, 2.0, 4.0))) == "2 (1–4)"
    assert (spread_text(Spread((2.0,))), spread_text(None)) == ("2", "–")


def test_the_table_in_the_terminal_has_figures_goals_and_failures() -> None:
    out = io.StringIO()
    show(made(), console(out))
    text = out.getvalue()
    assert re.search(r"c1 +output, tok/s +300 \(250–350\) +120 \(110–130\) +100 \(100–100\)", text)
    assert re.search(r"c1 +output +busllm-auto +llama +2.50× +≥ 1.5 +≥ 2.2 +aim reached", text)
    assert "failed: vllm, round 3: it ended & said <why>" in text


def formats() -> Comparison:
    """Our server in four formats."""
    names = [f"busllm-{kind}" for kind in ("auto", "none", "int8", "int4")]
    one = made()
    one.servers = [facts(name, is_ours=True) for name in names]
    own = [visit for visit in one.visits if visit.server == names[0]]
    one.visits = [msgspec.structs.replace(visit, server=name) for name in names for visit in own]
    return one


def test_every_format_of_ours_has_its_figures_on_the_page_and_in_terminals_of_any_width() -> None:
    for width in (80, 100, 200):
        out = io.StringIO()
        show(formats(), Console(file=out, force_terminal=True, color_system=None, highlight=False, width=width))
        text = out.getvalue()
        assert all(re.search(rf"^row .*\b{server.name}\b", text, re.MULTILINE) for server in formats().servers), width
        assert text.count(" 300 (250–350)") == 4
        assert "…" not in text
    assert page(formats()).count('<td class="number">300 (250–350)</td>') == 4
