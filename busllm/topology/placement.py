"""Which process holds which stages, as a pure function of the topology.

Owns: the names of stages, and the rules of `[[process]]` and of the default placement.
Does not know: how processes are started (`supervise.py`), whether a placement makes sense (`checks.py`).
Next on the path: `up.py` starts what is placed on its host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from busllm.topology.config import STAGE_KINDS, ProcessConfig, StageKind, Topology

_STAGE = re.compile(r"(?P<kind>[^:.]+)(?::(?P<index>\d{1,6})(?:\.(?P<rank>\d{1,6}))?)?")


class StageId(msgspec.Struct, frozen=True, order=True):
    """One stage of a cluster.

    Attributes:
        kind: what it does.
        index: which of its kind, from 0; of a scheduler, the replica.
        rank: tensor-parallel rank of a scheduler; 0 for all others.
    """

    kind: StageKind
    index: int
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}" + (f".{self.rank}" if self.rank else "")


class StagePattern(msgspec.Struct, frozen=True):
    """A stage's name as files and command lines write it; what is left out is None."""

    kind: StageKind
    index: int | None = None
    rank: int | None = None


class PlacedProcess(msgspec.Struct, frozen=True):
    """One process.

    Attributes:
        host: where it runs.
        stages: what it holds, in the order of a request's path.
    """

    host: str
    stages: tuple[StageId, ...]

    @property
    def name(self) -> str:
        """For people: the stages joined by `+`."""
        return "+".join(map(str, self.stages))

    def holds(self, kind: StageKind) -> bool:
        """Whether one of its stages is of that kind."""
        return any(stage.kind == kind for stage in self.stages)

    @property
    def replicas(self) -> frozenset[int]:
        """The scheduler replicas of which it holds a rank."""
        return frozenset(stage.index for stage in self.stages if stage.kind == "scheduler")

    @property
    def frontend_indexes(self) -> tuple[int, ...]:
        """The frontends that it holds."""
        return tuple(stage.index for stage in self.stages if stage.kind == "frontend")


def parse_stage(text: str) -> StagePattern:
    """Reads `tokenizer`, `scheduler:0` or `scheduler:0.1`.

    Raises:
        ValueError: the text has another form, or the kind does not exist.
    """
    match = _STAGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} must look like tokenizer, scheduler:0 or scheduler:0.1")
    kind = next((kind for kind in STAGE_KINDS if kind == match["kind"]), None)
    if kind is None:
        raise ValueError(f"there is no stage kind {match['kind']!r}; there are {', '.join(STAGE_KINDS)}")
    if match["rank"] is not None and kind != "scheduler":
        raise ValueError(f"{text!r} has a rank, but only schedulers have ranks")
    return StagePattern(
        kind=kind,
        index=None if match["index"] is None else int(match["index"]),
        rank=None if match["rank"] is None else int(match["rank"]),
    )


def num_ranks(topology: Topology, kind: StageKind) -> int:
    """How many ranks a stage of that kind has."""
    return topology.scheduler.tensor_parallel if kind == "scheduler" else 1


def all_stages(topology: Topology) -> list[StageId]:
    """Every stage of the cluster, in the order of a request's path."""
    return [
        StageId(kind, index, rank)
        for kind in STAGE_KINDS
        for index in range(topology.count_of(kind))
        for rank in range(num_ranks(topology, kind))
    ]


def matching(topology: Topology, pattern: StagePattern) -> list[StageId]:
    """The stages of the cluster that a name stands for; none when index or rank is beyond what there is."""
    return [
        stage
        for stage in all_stages(topology)
        if stage.kind == pattern.kind and pattern.index in (None, stage.index) and pattern.rank in (None, stage.rank)
    ]


def place(topology: Topology, this_host: str) -> list[PlacedProcess]:
    """Lays the stages out in processes.

    With `[[process]]` tables: one process per table. Without: a memory bus has everything in one process; else the
    frontend, tokenizer and detokenizer of the same index share a process, and each scheduler rank has its own.

    Args:
        this_host: host of processes that name none.
    """
    if topology.process:
        return [_placed(topology, process, this_host) for process in topology.process]
    if topology.bus.kind == "memory":
        return [PlacedProcess(this_host, tuple(all_stages(topology)))]
    return [PlacedProcess(this_host, stages) for stages in _default_groups(topology)]


def _placed(topology: Topology, process: ProcessConfig, this_host: str) -> PlacedProcess:
    wanted = {stage for name in process.stages for stage in matching(topology, parse_stage(name))}
    stages = tuple(stage for stage in all_stages(topology) if stage in wanted)
    return PlacedProcess(process.host or this_host, stages)


def _default_groups(topology: Topology) -> Iterator[tuple[StageId, ...]]:
    stages = all_stages(topology)
    light = [stage for stage in stages if stage.kind != "scheduler"]
    for index in range(max(stage.index for stage in light) + 1):
        yield tuple(stage for stage in light if stage.index == index)
    for stage in stages:
        if stage.kind == "scheduler":
            yield (stage,)
