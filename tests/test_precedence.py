"""Threads that give way, and those that compute, as the kernel sees them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from busllm.precedence import give_way, stop_giving_way

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no such policy")


def in_thread(do: Callable[[], int]) -> int:
    """What it returns in a thread of its own, so that the tests' thread keeps its policy."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(do()))
    thread.start()
    thread.join()
    return results[0]


def test_who_gives_way_does_so_with_all_that_it_starts() -> None:
    def start() -> int:
        give_way()
        ask = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]
        child = int(subprocess.run(ask, capture_output=True, check=True).stdout)
        assert child == in_thread(lambda: os.sched_getscheduler(0))
        return child

    assert in_thread(start) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_who_computes_does_not_give_way() -> None:
    def start() -> int:
        give_way()
        stop_giving_way()
        return os.sched_getscheduler(0)

    assert in_thread(start) == os.SCHED_OTHER


@pytest.mark.parametrize("change", [give_way, stop_giving_way])
def test_a_policy_that_somebody_chose_stays(change: Callable[[], None]) -> None:
    def start() -> int:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        change()
        return os.sched_getscheduler(0)

    assert in_thread(start) == os.SCHED_IDLE


@pytest.mark.parametrize("call", ["sched_getscheduler", "sched_setscheduler"])
def test_where_the_system_forbids_it_nothing_happens(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(os, call, forbid)
    give_way()
    stop_giving_way()
    monkeypatch.undo()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
