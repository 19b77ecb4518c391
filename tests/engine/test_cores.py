"""Which threads get cores of their own. Real threads of real processes: each test's run in a program of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from busllm.engine import cores

NUM_USABLE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
pytestmark = pytest.mark.skipif(NUM_USABLE < 2, reason="there are not two cores to choose from")

PROGRAM = """
import json, os, subprocess, sys, threading
from busllm.engine import cores

cores._CLAIM = "\\0" + sys.argv[2]
cores._PROCESSORS = cores.Path("/nowhere")
usable = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, usable)
threads, done = [], threading.Event()
for _ in range(int(sys.argv[1])):
    thread = threading.Thread(target=done.wait, daemon=True)
    thread.start()
    threads.append(thread)
bound = cores.bind_threads([thread.native_id for thread in threads])
masks = [sorted(os.sched_getaffinity(thread.native_id)) for thread in threads]
if bound is not None and len(sys.argv) > 3:
    again = subprocess.run([sys.executable, *sys.argv[3:]], capture_output=True, text=True, check=True).stdout
    bound.close()
    after = subprocess.run([sys.executable, *sys.argv[3:]], capture_output=True, text=True, check=True).stdout
    others = [json.loads(text.splitlines()[-1])["bound"] for text in (again, after)]
else:
    others = []
print(json.dumps({"bound": bound is not None, "masks": masks, "usable": usable, "others": others}))
done.set()
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return [str(file)]


@pytest.fixture
def claim(tmp_path: Path) -> str:
    """A name that no server on this machine claims."""
    return str(tmp_path / "claim")


def run(arguments: list[str], **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "OMP_PROC_BIND"} | environment,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_each_thread_gets_a_core(program: list[str], claim: str) -> None:
    result = run([*program, "2", claim])
    assert result["bound"]
    assert sorted(result["masks"]) == [[processor] for processor in result["usable"]]


@pytest.mark.parametrize("num_threads", ["1", "3"])
def test_threads_that_do_not_match_the_cores_are_left_alone(program: list[str], claim: str, num_threads: str) -> None:
    result = run([*program, num_threads, claim])
    assert not result["bound"]
    assert all(mask == result["usable"] for mask in result["masks"])


def test_the_environment_can_forbid_it(program: list[str], claim: str) -> None:
    result = run([*program, "2", claim], OMP_PROC_BIND="false")
    assert not result["bound"]
    assert all(mask == result["usable"] for mask in result["masks"])


@pytest.mark.parametrize("call", ["sched_getaffinity", "sched_setaffinity"])
def test_where_the_system_forbids_it_nothing_happens(monkeypatch: pytest.MonkeyPatch, claim: str, call: str) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError(1, "not here")

    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    monkeypatch.setattr(cores, "_CLAIM", "\0" + claim)
    monkeypatch.setattr(os, call, forbid)
    assert cores.bind_threads([1 << 30, (1 << 30) + 1]) is None
    cores.unbind_thread()


def test_where_names_of_sockets_are_forbidden_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    monkeypatch.setattr(cores, "_CLAIM", "/nowhere/claim")
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert cores.bind_threads([1 << 30, (1 << 30) + 1]) is None
    monkeypatch.undo()
    assert os.sched_getaffinity(0) == before


def test_one_process_of_a_host_at_a_time(program: list[str], claim: str) -> None:
    result = run([*program, "2", claim, *program, "2", claim])
    assert result["others"] == [False, True]


def test_processors_of_one_core_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for processor, siblings in enumerate(("0,4", "1,5", "2-3", "2-3", "0,4", "1,5")):
        folder = tmp_path / f"cpu{processor}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(cores, "_PROCESSORS", tmp_path)
    assert cores._cores({0, 1, 2, 3, 4, 5}, 3) == [{0, 4}, {1, 5}, {2, 3}]
    assert cores._cores({1, 2, 4, 5}, 3) == [{1, 5}, {2}, {4}]
    assert cores._cores({0, 1, 2, 3, 4, 5}, 6) == [{0}, {1}, {2}, {3}, {4}, {5}]


def test_a_thread_can_go_back_to_all_cores(program: list[str]) -> None:
    code = (
        "import json, os, threading\n"
        "from busllm.engine.cores import unbind_thread\n"
        "seen = []\n"
        "def child():\n"
        "    unbind_thread()\n"
        "    seen.append(sorted(os.sched_getaffinity(0)))\n"
        "def bound():\n"
        "    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "    thread = threading.Thread(target=child); thread.start(); thread.join()\n"
        "    seen.append(sorted(os.sched_getaffinity(0)))\n"
        "thread = threading.Thread(target=bound); thread.start(); thread.join()\n"
        "print(json.dumps(seen))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    unbound, still_bound = json.loads(done.stdout.splitlines()[-1])
    assert len(unbound) == NUM_USABLE
    assert len(still_bound) == 1
