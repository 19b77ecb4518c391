"""The table: which rows belong together, what `busllm bench` is told, what is read off its report."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from bench.compare.client import bench_arguments, figures_of
from bench.compare.results import load, save
from bench.compare.rounds import round_seed, row_seed, why_left_out
from bench.compare.rows import ROWS, Figure, Row, chosen_rows, quick
from busllm.cli.bench import _workload, add_arguments
from busllm.cli.load.report import ArrivalReport, Percentiles, Report
from busllm.cli.load.workload import Workload
from tests.bench.made import facts, made

LOADS = [row for row in ROWS if row.workload is not None]


def report_of(workload: Workload, failed: int = 0) -> Report:
    times = Percentiles(1.0, 2.0, 3.0, 4.0)
    return Report(
        url="u",
        model="m",
        concurrency=8,
        workload=workload,
        ok=8,
        failed=failed,
        wall_s=2.0,
        input_tokens=100,
        output_tokens=300,
        output_tokens_per_s=150.0,
        total_tokens_per_s=200.0,
        requests_per_s=4.0,
        ttft_ms=times,
        inter_token_ms=times,
        generator_busy=0.1,
        errors={},
        arrival=ArrivalReport(
            input_tokens=4000,
            output_tokens=100,
            ttft_ms=77.0,
            duration_ms=99.0,
            streams_inter_token_ms=Percentiles(5.0, 6.0, 7.0, 8.0),
            num_pauses=9,
            error=None,
        ),
    )


@pytest.mark.parametrize("row", LOADS, ids=lambda row: row.key)
def test_busllm_bench_is_told_exactly_the_workload_of_a_row(row: Row) -> None:
    assert row.workload is not None
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for workload in (row.workload, msgspec.structs.replace(row.workload, seed=3, chat=True, ignore_eos=False)):
        arguments = parser.parse_args(bench_arguments(workload, row.concurrency))
        assert _workload(arguments) == workload
        assert arguments.concurrency == row.concurrency


def test_a_row_brings_those_that_must_come_before_it() -> None:
    assert [row.key for row in chosen_rows(["memory"])] == ["c32", "memory"]
    assert [row.key for row in chosen_rows(["shared-warm", "c1"])] == ["c1", "shared-cold", "shared-warm"]
    assert [row.key for row in chosen_rows(["offline"])] == ["c32", "offline"]
    with pytest.raises(KeyError):
        chosen_rows(["c99"])


def test_what_comes_after_a_row_comes_right_after_it() -> None:
    keys = [row.key for row in ROWS]
    assert all(keys[keys.index(row.key) - 1] == row.after for row in ROWS if row.after is not None)


def test_rows_and_rounds_have_prompts_of_their_own_and_only_a_repetition_has_the_same() -> None:
    rows = chosen_rows(row.key for row in ROWS)
    seeds = {row.key: [row_seed(row, rows, round_seed(0, number)) for number in (1, 2)] for row in rows}
    assert seeds["shared-warm"] == seeds.pop("shared-cold")
    assert seeds["c32"] == seeds.pop("offline")
    assert len({seed for pair in seeds.values() for seed in pair}) == 2 * len(seeds)


def test_the_engine_alone_gets_the_very_load_of_32_clients() -> None:
    clients, alone = chosen_rows(["offline"])
    assert (alone.workload, alone.concurrency) == (clients.workload, clients.concurrency)
    assert quick([alone])[0].workload == quick([clients])[0].workload


def test_a_quick_row_has_as_many_clients_and_less_of_everything_else() -> None:
    for row, small in zip(ROWS, quick(ROWS), strict=True):
        assert (row.key, row.concurrency, row.figures) == (small.key, small.concurrency, small.figures)
        if row.workload is not None and small.workload is not None:
            assert row.concurrency <= small.workload.requests <= row.workload.requests
            assert small.workload.output_tokens == row.workload.output_tokens // 4


def test_figures_are_those_that_the_row_asks_for() -> None:
    [arriving] = chosen_rows(["arriving"])
    assert arriving.workload is not None
    found = figures_of(arriving, report_of(arriving.workload), server_cpu_s=0.8)
    assert found == {
        Figure.STREAMS_P99: 7.0,
        Figure.LONG_TTFT: 77.0,
        Figure.OUTPUT: 150.0,
        Figure.INTER_TOKEN_P50: 1.0,
        Figure.INTER_TOKEN_P99: 3.0,
        Figure.CPU: 2.0,
    }


@pytest.mark.parametrize("row", [row for row in LOADS if not row.is_offline], ids=lambda row: row.key)
def test_every_load_on_a_server_tells_how_long_texts_are_apart(row: Row) -> None:
    assert {Figure.INTER_TOKEN_P50, Figure.INTER_TOKEN_P99} <= set(row.figures[:5])


def test_a_row_with_a_failed_request_has_no_figures() -> None:
    [row] = chosen_rows(["c8"])
    assert row.workload is not None
    assert figures_of(row, report_of(row.workload, failed=1), server_cpu_s=1.0) == {}


def test_a_row_is_left_out_where_its_longest_sequence_has_no_room() -> None:
    [arriving] = chosen_rows(["arriving"])
    assert "4,096" in (why_left_out(arriving, facts("small", max_sequence_tokens=2048)) or "")
    assert why_left_out(arriving, facts("large", max_sequence_tokens=8192)) is None


def test_a_comparison_is_read_as_it_was_saved(tmp_path: Path) -> None:
    save(made(), tmp_path / "figures.json")
    assert load(tmp_path / "figures.json") == made()
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
