"""The wrapper that makes a child die with its parent."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from busllm.topology.die_with_parent import wrapper_command

PARENT = """
import os, subprocess, sys
from busllm.topology.die_with_parent import wrapper_command
child = subprocess.Popen([*wrapper_command(os.getpid()), "sleep", "600"])
print(child.pid, flush=True)
sys.stdin.read()
"""


def run(*command: str, parent_pid: int | None = None) -> subprocess.CompletedProcess[str]:
    wrapper = wrapper_command(os.getpid() if parent_pid is None else parent_pid)
    return subprocess.run([*wrapper, *command], capture_output=True, text=True, timeout=20, check=False)


def test_the_command_runs_with_its_arguments_output_and_exit_status() -> None:
    done = run(sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "a b", "--", "-c")
    assert (done.returncode, done.stdout) == (7, "['a b', '--', '-c']\n")


def test_the_process_keeps_its_pid() -> None:
    wrapper = wrapper_command(os.getpid())
    command = [*wrapper, sys.executable, "-c", "import os; print(os.getpid())"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert int(child.stdout.read()) == child.pid


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_child_of_a_killed_parent_dies() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        descriptor = os.pidfd_open(int(parent.stdout.readline()))
        assert not select.select([descriptor], [], [], 0)[0], "it lives as long as its parent"
        parent.kill()
        assert select.select([descriptor], [], [], 20)[0], "it outlived its parent"
        os.close(descriptor)


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    done = run("echo", "started", parent_pid=os.getppid())
    assert (done.returncode, done.stdout) == (1, "")


def test_a_command_that_is_not_there_is_named() -> None:
    done = run("/nowhere/command")
    assert done.returncode == 1
    assert "/nowhere/command" in done.stderr


def test_without_a_command_it_says_how_to_use_it() -> None:
    assert "usage" in run().stderr


def test_it_imports_nothing_that_makes_it_slow() -> None:
    python, *rest = wrapper_command(os.getpid())
    done = subprocess.run([python, "-X", "importtime", *rest, "true"], capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "ctypes" in imported
    assert not any(name == "site" or name.startswith("busllm") for name in imported)
