"""Where the ranks of a replica meet and what each of them is called, as functions of the topology.

Owns: the kind and index that a rank announces, the address where rank 0 gathers the others, the number of the device on
which a rank computes when the file leaves it open.
Does not know: how they meet (`engine/parallel/`), which of them are there.
Next on the path: `stages/build.py`.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import msgspec

from busllm.topology.address import WILDCARDS, Address, parse_address
from busllm.topology.config import Topology
from busllm.topology.placement import StageId, all_stages, place

RANK_KIND = "rank"
_LOOPBACK = "127.0.0.1"
_THIS_HOST = "this host"  # no host's name has a blank


class MeetingAddress(msgspec.Struct, frozen=True):
    """Where rank 0 listens, and the host by which the others reach it."""

    listen: Address
    host: str


def announced_place(topology: Topology, stage: StageId) -> tuple[str, int]:
    """The kind and index that a stage announces.

    A rank behind the first is of a kind of its own; its index is its number among all ranks of the cluster, since only
    one live instance may have the same kind and index.
    """
    if stage.rank == 0:
        return stage.kind, stage.index
    return RANK_KIND, stage.index * topology.scheduler.tensor_parallel + stage.rank


def meeting_address(topology: Topology, replica: int, bus_url: str | None) -> MeetingAddress:
    """Where the ranks of a replica meet.

    The loopback interface when all of them are on one host, else the address by which this host reaches the bus; on a
    free port. `scheduler.collective_listen` says something else.

    Args:
        bus_url: of the bus in use.
    """
    text = topology.scheduler.collective_listen
    if text is not None:
        listen = parse_address(text)
        return MeetingAddress(listen, own_address(bus_url) if listen.host in WILDCARDS else listen.host)
    host = _LOOPBACK if len(_hosts_of(topology, replica)) == 1 else own_address(bus_url)
    return MeetingAddress(Address(host, 0), host)


def is_on_one_host(topology: Topology, replica: int) -> bool:
    """Whether all ranks of a replica are placed on one host."""
    return len(_hosts_of(topology, replica)) == 1


def device_number(topology: Topology, stage: StageId) -> int:
    """The number of a scheduler's rank among those of all schedulers of its host."""
    hosts = hosts_of_stages(topology)
    beside = [other for other in all_stages(topology) if other.kind == "scheduler" and hosts[other] == hosts[stage]]
    return beside.index(stage)


def num_ranks_beside(topology: Topology, stage: StageId) -> int:
    """How many ranks of a scheduler's replica are on its host, itself included."""
    hosts = hosts_of_stages(topology)
    return sum(
        hosts[other] == hosts[stage]
        for other in all_stages(topology)
        if (other.kind, other.index) == (stage.kind, stage.index)
    )


def own_address(bus_url: str | None) -> str:
    """This host's own address on the way to the bus."""
    first = (bus_url or "").split(",")[0].strip()
    host = urlsplit(first).hostname or socket.gethostname()
    family, _, _, _, where = socket.getaddrinfo(host, 4222, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing
        address: str = probe.getsockname()[0]
    return address


def hosts_of_stages(topology: Topology) -> dict[StageId, str]:
    """The host of every stage; that of processes that name none is called "this host"."""
    return {stage: placed.host for placed in place(topology, _THIS_HOST) for stage in placed.stages}


def _hosts_of(topology: Topology, replica: int) -> set[str]:
    return {
        host
        for stage, host in hosts_of_stages(topology).items()
        if stage.kind == "scheduler" and stage.index == replica
    }
