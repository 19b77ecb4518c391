"""Ranks that could not meet.

Owns: the mistakes about `scheduler.collective_listen`.
Does not know: whether the model's heads can be shared out (`model_fit.py`).
Next on the path: `ranks.py`, which chooses the address.
"""

from __future__ import annotations

from collections.abc import Iterator

from busllm.topology.address import is_loopback, parse_address
from busllm.topology.config import Topology
from busllm.topology.placement import StageId
from busllm.topology.problem import Problem
from busllm.topology.ranks import hosts_of_stages, is_on_one_host

_PATH = ("scheduler", "collective_listen")


def find_rank_problems(topology: Topology) -> Iterator[Problem]:
    """Yields the mistakes; the placement is known to be right."""
    text = topology.scheduler.collective_listen
    if text is None:
        return
    if topology.scheduler.tensor_parallel == 1:
        yield Problem(_PATH, "has an effect only with scheduler.tensor_parallel above 1; leave it out.")
        return
    address = parse_address(text)
    replicas = range(topology.scheduler.count)
    if is_loopback(address.host) and not all(is_on_one_host(topology, replica) for replica in replicas):
        yield Problem(
            _PATH, f'is "{text}", which ranks on other hosts do not reach; name an address of rank 0\'s host.'
        )
    hosts = hosts_of_stages(topology)
    first_ranks = [hosts[StageId("scheduler", replica)] for replica in replicas]
    if address.port and len(set(first_ranks)) < len(first_ranks):
        yield Problem(_PATH, f"has the port {address.port}, but one host has several replicas; use port 0.")
