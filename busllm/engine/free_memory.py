"""How much of the host's memory a KV cache may take.

Owns: the question to the operating system: what can be had without swapping, and what a container or service may have.
Does not know: which share of it is asked for, and devices (`engine/memory_profile.py`).

What the kernel calls free is what nobody uses at all: after a while of reading files next to nothing, since their
content is kept as long as nobody needs the room. So such memory counts as free here, on the host (`MemAvailable`) and
under the limits of control groups, whose use includes files read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from busllm.errors import EngineError


@dataclass(frozen=True)
class _Layout:
    """File names of a version of control groups (kernel documentation, admin-guide/cgroup-v1 and cgroup-v2)."""

    folder: str
    limit: str
    used: str
    idle_files: str  # entry of memory.stat: files that were not read lately


_V1 = _Layout("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Layout("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


SPARED_BYTES = 512 * 2**20  # of the host: a step's own numbers, and the programs beside this one


def kv_bytes_of_free_memory(share: float, num_sharers: int = 1, root: Path = Path("/"), mapped_bytes: int = 0) -> int:
    """A share of the host's free memory, some of which is always spared; 0 when there is no more than that.

    Args:
        share: above 0, at most 1.
        num_sharers: how many processes fill it alike, this one included.
        root: of the file system.
        mapped_bytes: of files that must stay in memory, though the kernel counts them as available.

    Raises:
        EngineError: the kernel does not say how much there is.
    """
    return int(max(0, free_memory_bytes(root=root) - mapped_bytes - SPARED_BYTES) * share) // num_sharers


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of the host's memory that this process and others like it may still take.

    Args:
        root: of the file system.

    Raises:
        EngineError: the kernel does not say.
    """
    try:
        return min([_available_bytes(root), *_left_in_groups(root)])
    except (OSError, KeyError, ValueError) as error:
        raise EngineError(
            "The kernel does not say how much memory is free. Give scheduler.kv_tokens, or kv_memory as an amount. "
            f"({type(error).__name__}: {error})"
        ) from error


def _available_bytes(root: Path) -> int:
    return _entries(root / "proc" / "meminfo")["MemAvailable:"] * 1024


def _left_in_groups(root: Path) -> Iterator[int]:
    """What each group that this process is in may still take, at least 0; groups without a limit leave very much."""
    path = root / "proc" / "self" / "cgroup"
    for line in path.read_text().splitlines() if path.is_file() else ():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            layout = _V1
        elif not controllers:
            layout = _V2
        else:
            continue
        # In a container the name may be the host's, and the container's own group stands at the top.
        inner = Path(group.lstrip("/"))
        for folder in (inner, *inner.parents):
            yield from _left_in_group(root / layout.folder / folder, layout)


def _left_in_group(folder: Path, layout: _Layout) -> Iterator[int]:
    try:
        limit, used = ((folder / name).read_text().strip() for name in (layout.limit, layout.used))
        idle_files = _entries(folder / "memory.stat").get(layout.idle_files, 0)
    except FileNotFoundError:  # the topmost group has no limit, and not every group counts memory
        return
    if limit != "max":
        yield max(0, int(limit) - max(0, int(used) - idle_files))


def _entries(path: Path) -> dict[str, int]:
    """A file with a name and a number in each line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
