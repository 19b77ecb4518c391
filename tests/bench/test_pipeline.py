"""The measurement of the pipeline runs, and every hop and placement is in its tables."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.pipeline_servers import PLACEMENTS


@pytest.mark.slow
def test_both_tables_have_a_figure_for_every_hop_and_every_placement() -> None:
    command = [sys.executable, "-m", "bench.pipeline", "--streams", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in done.stdout.splitlines() if "|" in line]
    hops = {row[0]: float(row[1]) for row in rows if len(row) == 2 and row[1].replace(".", "").isdecimal()}
    assert len(hops) == 9
    assert all(used_us > 0 for used_us in hops.values())
    loads = [row for row in rows if row[0] in PLACEMENTS]
    assert [row[0] for row in loads] == list(PLACEMENTS)
    assert [row[3] for row in loads] == ["1.000"] * len(PLACEMENTS)
