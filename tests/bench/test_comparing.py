"""Whole comparisons, of the null model with itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.compare.__main__ import main
from bench.compare.peers.ours import OurConfig, OurPeer
from bench.compare.results import load
from bench.compare.server import Launch, ServerFailure, free_port, running
from busllm.topology.config import DEFAULT_KV_TOKENS, Topology
from busllm.topology.read import parse_topology

NULL = ["--model", "null", "--quick"]


@pytest.mark.slow
def test_a_quick_run_measures_what_it_was_asked_for_and_writes_figures_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*NULL, "--rows", "start,memory,offline,arriving", "--rounds", "2", "--out", str(tmp_path)]
    assert main(words) == 0
    comparison = load(tmp_path / "comparison.json")
    assert [visit.round_number for visit in comparison.visits] == [1, 2]
    for visit in comparison.visits:
        assert list(visit.rows) == ["start", "c32", "memory", "offline", "arriving"]
        assert all(len(result.figures) > 0 for result in visit.rows.values())
        report = visit.rows["arriving"].report
        assert report is not None
        assert report.arrival is not None
        assert report.arrival.num_pauses > 0
    said = capsys.readouterr().out
    assert "memory of all processes (PSS)" in said
    assert "its own offline" in said
    (tmp_path / "comparison.html").unlink()
    assert main(["--show", str(tmp_path / "comparison.json")]) == 0
    assert "<svg" in (tmp_path / "comparison.html").read_text()


@pytest.mark.parametrize("words", [["--rows", "c99"], ["--peers", "nobody"], ["--quantization", "int3"]])
def test_a_name_that_does_not_exist_ends_with_2_and_those_that_do(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "there are" in capsys.readouterr().err


def test_a_server_that_ends_at_once_is_a_failure_with_the_end_of_its_log(tmp_path: Path) -> None:
    launch = Launch(command=("/bin/sh", "-c", "echo no such model; exit 3"), ready_path="/health")
    log = tmp_path / "server.log"
    with (
        pytest.raises(ServerFailure, match=r"status 3.*no such model"),
        running(launch, port=free_port(), model="m", log=log, patience_s=10.0),
    ):
        pass


def test_our_topology_is_the_default_one_but_for_what_was_asked(tmp_path: Path) -> None:
    peer = OurPeer(OurConfig("smollm2-135m", "int8"), tmp_path)
    command = peer.launch(port=8123).command
    topology = parse_topology(Path(command[-1]).read_text(), "file")
    assert (topology.model.quantization, topology.frontend.listen) == ("int8", "127.0.0.1:8123")
    assert topology.scheduler == Topology().scheduler
    assert peer.facts().kv_tokens == DEFAULT_KV_TOKENS
