"""The engine alone, under the load that clients put on the server."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec

from bench.compare.offline import Offline
from bench.compare.peers.ours import OurConfig, OurPeer
from bench.compare.results import RowResult
from bench.compare.rows import Figure
from busllm.cli.load.workload import Workload

LOAD = Workload(requests=5, input_words=10, output_tokens=20, temperature=0.8, top_p=0.95, seed=3)


def order(**changed: object) -> Offline:
    known = {"source": "null", "quantization": "auto", "kv_tokens": 4096, "workload": LOAD, "max_running": 2}
    return msgspec.convert(known | changed, Offline, from_attributes=True)


def test_its_process_writes_tokens_per_second_and_cpu_time_per_token(tmp_path: Path) -> None:
    peer = OurPeer(OurConfig("null", kv_tokens=4096), tmp_path)
    command = peer.offline_command(LOAD, 2)
    assert command == order().command()
    done = subprocess.run(command, capture_output=True, check=True)
    found = msgspec.json.decode(done.stdout, type=RowResult)
    assert set(found.figures) == {Figure.OUTPUT.value, Figure.CPU.value}
    assert all(value > 0 for value in found.figures.values())


def test_a_model_that_is_not_there_is_told_on_stderr_and_no_figure_is_written(tmp_path: Path) -> None:
    done = subprocess.run(order(source=str(tmp_path / "none")).command(), capture_output=True, check=False)
    assert (done.stdout, done.returncode == 0) == (b"", False)
    assert str(tmp_path / "none") in done.stderr.decode()
