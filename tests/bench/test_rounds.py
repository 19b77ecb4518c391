"""Turns: every server in every round, whatever becomes of another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.compare.results import RowResult, ServerFacts
from bench.compare.rounds import Schedule, visits
from bench.compare.rows import Figure, Row, chosen_rows
from bench.compare.server import Launch, RunningServer, ServerFailure
from busllm.cli.load.workload import Workload
from tests.bench.made import facts

# A server as small as can be: it answers everything with one word, or dies of the first question.
SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        Handler.is_mortal = self.path == "/mortal"
        self.send_response(200); self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if Handler.is_mortal:
            print("that was all", flush=True)
            os._exit(3)
        self.send_response(200); self.end_headers()
        self.wfile.write(b'data: {"choices": [{"text": "word"}]}\\n\\ndata: [DONE]\\n\\n')
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
ALONE = Row(
    key="alone",
    title="alone",
    workload=Workload(requests=5),
    concurrency=3,
    figures=(Figure.OUTPUT,),
    requests_of="memory",
    is_offline=True,
)
MEMORY = Row(key="memory", title="memory", figures=(Figure.PSS,))


class FakePeer:
    """A server of one word.

    Args:
        ready_path: what is asked of it until it serves.
        is_ours: whether it has a program that computes without it.
    """

    served_model = "m"
    is_installed = True

    def __init__(self, name: str, ready_path: str = "/", *, is_ours: bool = True) -> None:
        self.name = name
        self._ready_path = ready_path
        self._is_ours = is_ours

    def install(self) -> None:
        """It is there."""

    def facts(self) -> ServerFacts:
        """Facts without meaning."""
        return facts(self.name)

    def launch(self, port: int) -> Launch:
        """Starts it."""
        return Launch(command=(sys.executable, "-c", SERVER, str(port)), ready_path=self._ready_path)

    def offline_command(self, workload: Workload, concurrency: int) -> tuple[str, ...] | None:
        """Tells what it was asked for, in place of figures."""
        if not self._is_ours:
            return None
        asked = {"requests": float(workload.requests), "at_once": float(concurrency), "seed": float(workload.seed)}
        told = msgspec.json.encode(RowResult(figures=asked)).decode()
        return (sys.executable, "-c", f"print({told!r})")


def schedule(folder: Path, *, rehearse: bool = False) -> Schedule:
    rows = (*chosen_rows(["start"]), MEMORY)
    return Schedule(rows=rows, num_rounds=2, seed=0, rehearse=rehearse, log_folder=folder / "logs", patience_s=20.0)


def test_servers_take_turns_and_a_first_start_is_no_turn(tmp_path: Path) -> None:
    told: list[str] = []
    peers = [FakePeer("a"), FakePeer("b")]
    found = list(visits(peers, schedule(tmp_path, rehearse=True), told.append))
    assert [(visit.server, visit.round_number) for visit in found] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [visit.seed for visit in found] == [1000, 1000, 2000, 2000]
    assert all(visit.rows["start"].figures[Figure.START.value] > 0 for visit in found)
    assert all(visit.rows["memory"].figures[Figure.PSS.value] > 1 for visit in found)
    assert len([text for text in told if "first start" in text]) == 2


def test_a_server_that_dies_is_told_of_and_the_others_go_on(tmp_path: Path) -> None:
    peers = [FakePeer("mortal", "/mortal"), FakePeer("b")]
    mortal, other, *_ = visits(peers, schedule(tmp_path), lambda _: None)
    assert (mortal.rows, mortal.error is None) == ({}, False)
    assert "that was all" in (mortal.error or "")
    assert (other.error, list(other.rows)) == (None, ["start", "memory"])


def test_a_row_without_a_server_is_computed_in_every_round_beside_it_where_there_is_a_program_for_it(
    tmp_path: Path,
) -> None:
    asked = msgspec.structs.replace(schedule(tmp_path), rows=(MEMORY, ALONE))
    peers = [FakePeer("ours"), FakePeer("other", is_ours=False)]
    ours, other, again, _ = [visit.rows["alone"] for visit in visits(peers, asked, lambda _: None)]
    assert ours.figures == {"requests": 5.0, "at_once": 3.0, "seed": 1000.0}
    assert again.figures == {"requests": 5.0, "at_once": 3.0, "seed": 2000.0}
    assert ours.other_busy is not None
    assert (other.figures, other.error, other.left_out is None) == ({}, None, False)


def test_a_server_that_died_between_two_rows_is_found_before_the_next(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("out of memory")
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"]) as process:
        process.wait()
    with pytest.raises(ServerFailure, match=r"status 9.*out of memory"):
        RunningServer(process, log, "url", 1.0).check()
