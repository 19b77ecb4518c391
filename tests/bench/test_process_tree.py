"""Processes of a server, sessions of their own included."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.compare import process_tree
from bench.compare.process_tree import Status, status_of

# A parent whose child has a session of its own, as a bus server has; both say when they are there.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
                         start_new_session=True)
child.wait()
"""


@pytest.fixture
def family() -> Iterator[subprocess.Popen[bytes]]:
    """The parent, when its child runs."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        yield parent
        process_tree.end(parent.pid, grace_s=0)


def test_a_command_named_with_blanks_and_parentheses_is_read() -> None:
    fields = "7 (a) b (c) S 3 7 7 0 -1 0 0 0 0 0 100 50 25 25 20 0 1 0 4242 0 0"
    known = status_of(fields)
    assert (known.pid, known.parent, known.state, known.started) == (7, 3, "S", 4242)
    assert known.cpu_s == 200 / process_tree._TICKS_PER_S


def test_a_tree_has_children_in_other_sessions_and_their_memory(family: subprocess.Popen[bytes]) -> None:
    tree = process_tree.processes_under(family.pid)
    assert len(tree) == 2
    assert {status.parent for status in tree} >= {family.pid}
    child = next(status.pid for status in tree if status.pid != family.pid)
    assert process_tree.pss_bytes(family.pid) > process_tree.pss_bytes(child) > 1_000_000
    assert process_tree.cpu_s(family.pid) >= 0


def test_ending_a_tree_ends_all_of_it(family: subprocess.Popen[bytes]) -> None:
    tree = process_tree.processes_under(family.pid)
    process_tree.end(family.pid, grace_s=0.1)  # the parent goes, its child hears nothing
    assert not any(map(process_tree._lives, tree))


def test_a_process_that_is_gone_has_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert process_tree.processes_under(gone.pid) == []
    assert process_tree.pss_bytes(gone.pid) == 0


def test_another_process_of_the_same_number_is_not_taken_for_it(family: subprocess.Popen[bytes]) -> None:
    stranger = Status(family.pid, 1, "S", started=1, cpu_s=0.0)
    assert not process_tree._lives(stranger)
