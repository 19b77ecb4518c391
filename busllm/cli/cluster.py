"""Which cluster a client command talks to.

Owns: the order of looking: `--bus URL`, `--topology FILE`, then the state file of a cluster that runs on this host.
Does not know: what the command does there.
Next on the path: `Target.open_bus()`, or `Target.http` for commands that speak HTTP.
"""

from __future__ import annotations

import argparse

import msgspec

from busllm.bus.protocol import Bus
from busllm.bus.subjects import Subjects
from busllm.errors import ConfigError
from busllm.topology.config import BusConfig, Topology
from busllm.topology.open_bus import open_topology_bus
from busllm.topology.read import load_topology
from busllm.topology.state import MEMORY, RunningCluster, find_cluster

DEFAULT_CLUSTER = "local"


class Target(msgspec.Struct, frozen=True):
    """A cluster.

    Attributes:
        cluster: its name.
        bus: how its bus is reached.
        bus_url: with its secret; None where the bus has none (memory, some plug-ins).
        http: URLs of its frontends, as far as they are known here.
    """

    cluster: str
    bus: BusConfig
    bus_url: str | None
    http: tuple[str, ...] = ()

    @property
    def subjects(self) -> Subjects:
        """Its subjects."""
        return Subjects(self.cluster)

    def open_bus(self) -> Bus:
        """Makes its bus; nothing is connected yet.

        Raises:
            ConfigError: it runs on a memory bus, or an option is wrong.
        """
        self.need_bus()
        return open_topology_bus(self.bus, self.bus_url)

    def need_bus(self) -> None:
        """Checks that other processes can reach the bus.

        Raises:
            ConfigError: it is a memory bus.
        """
        if self.bus.kind == MEMORY:
            raise ConfigError(
                f"cluster {self.cluster!r} runs on a memory bus, which lives inside its one process; "
                'other programs reach a cluster with bus.kind = "nats".'
            )


def find_target(arguments: argparse.Namespace) -> Target:
    """Finds the cluster that the arguments of `add_cluster_arguments` name.

    Raises:
        ConfigError: none, or several, or the arguments contradict each other.
    """
    if arguments.bus is not None and arguments.topology is not None:
        raise ConfigError("--bus and --topology both name a bus; give one of them.")
    if arguments.bus is not None:
        return Target(arguments.cluster or DEFAULT_CLUSTER, BusConfig(url=arguments.bus), arguments.bus)
    if arguments.topology is not None:
        return _named_by(load_topology(arguments.topology), arguments.cluster)
    return _running(find_cluster(arguments.cluster))


def _named_by(topology: Topology, cluster: str | None) -> Target:
    if cluster is not None and cluster != topology.cluster:
        raise ConfigError(f"--cluster is {cluster!r}, but the topology file's cluster is {topology.cluster!r}.")
    if topology.bus.kind != "nats" or topology.bus.url is not None:
        return Target(topology.cluster, topology.bus, topology.bus.url)
    return _running(find_cluster(topology.cluster))  # `up` started the server: only the state file knows where


def _running(running: RunningCluster) -> Target:
    bus = load_topology(running.topology).bus
    has_url = bus.kind != MEMORY and "://" in running.bus
    return Target(running.cluster, bus, running.bus if has_url else None, running.http)
