"""How much memory can be had, as the kernel's files say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from busllm.engine.free_memory import SPARED_BYTES, free_memory_bytes, kv_bytes_of_free_memory
from busllm.errors import EngineError

MIB = 2**20
MEMINFO = "MemTotal:       8192 kB\nMemFree:         100 kB\nMemAvailable:   4096 kB\nHugePages_Total:       0\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_v2(root: Path, group: str, limit: str, used: int, idle_files: int = 0) -> None:
    folder = f"sys/fs/cgroup/{group}"
    write(root, f"{folder}/memory.max", f"{limit}\n")
    write(root, f"{folder}/memory.current", f"{used}\n")
    write(root, f"{folder}/memory.stat", f"anon {used}\ninactive_file {idle_files}\n")


def test_memory_that_keeps_files_for_the_time_being_is_free(root: Path) -> None:
    assert free_memory_bytes(root=root) == 4 * MIB


def test_a_limit_of_control_groups_counts_less_what_they_use(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/pods/one\n")
    write_v2(root, "pods/one", "max", 5)
    assert free_memory_bytes(root=root) == 4 * MIB
    write_v2(root, "pods/one", str(3 * MIB), 2 * MIB)
    assert free_memory_bytes(root=root) == MIB
    write_v2(root, "pods/one", str(3 * MIB), 2 * MIB, idle_files=MIB)
    assert free_memory_bytes(root=root) == 2 * MIB


def test_so_does_that_of_an_outer_group(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/pods/one\n")
    write_v2(root, "pods/one", str(3 * MIB), MIB)
    write_v2(root, "pods", str(2 * MIB), MIB)
    assert free_memory_bytes(root=root) == MIB


def test_in_a_container_the_own_group_stands_at_the_top(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/a/name/of/the/host\n")
    write_v2(root, "", str(2 * MIB), MIB)
    assert free_memory_bytes(root=root) == MIB


def test_the_older_control_groups_are_asked_too(root: Path) -> None:
    write(root, "proc/self/cgroup", "7:blkio:/\n4:cpuacct,memory:/pods/one\n0::/\n")
    folder = "sys/fs/cgroup/memory/pods/one"
    write(root, f"{folder}/memory.limit_in_bytes", f"{3 * MIB}\n")
    write(root, f"{folder}/memory.usage_in_bytes", f"{2 * MIB}\n")
    write(root, f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {MIB // 2}\n")
    assert free_memory_bytes(root=root) == MIB + MIB // 2


def test_a_group_that_uses_more_than_its_limit_leaves_nothing(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    write_v2(root, "", str(MIB), 2 * MIB)
    assert free_memory_bytes(root=root) == 0


def test_a_kernel_that_does_not_say_is_an_error_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="kv_tokens"):
        free_memory_bytes(root=tmp_path)


def test_a_limit_that_cannot_be_read_is_the_same_error(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max/not-a-file", "")
    with pytest.raises(EngineError, match="IsADirectoryError"):
        free_memory_bytes(root=root)


def test_a_limit_that_is_no_number_is_too(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    write_v2(root, "", "some", MIB)
    with pytest.raises(EngineError, match="ValueError"):
        free_memory_bytes(root=root)


def test_a_share_of_all_spares_some_for_everything_else(root: Path) -> None:
    write(root, "proc/meminfo", f"MemAvailable: {4 * 2**20} kB\n")
    assert kv_bytes_of_free_memory(1.0, root=root) == 4 * 2**30 - SPARED_BYTES
    assert kv_bytes_of_free_memory(0.5, 2, root) == (4 * 2**30 - SPARED_BYTES) // 4
    write(root, "proc/meminfo", MEMINFO)
    assert kv_bytes_of_free_memory(1.0, root=root) == 0


def test_files_that_every_step_reads_are_not_free(root: Path) -> None:
    write(root, "proc/meminfo", f"MemAvailable: {4 * 2**20} kB\n")
    assert kv_bytes_of_free_memory(1.0, 1, root, 2**30) == 3 * 2**30 - SPARED_BYTES
    assert kv_bytes_of_free_memory(1.0, 1, root, 4 * 2**30) == 0


def test_this_host_has_some() -> None:
    assert 0 < free_memory_bytes() < 2**60
