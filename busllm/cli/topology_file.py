"""Reading the topology that a command was given, for the commands that run or check one.

Owns: reading, checking, and refusing what this version cannot run.
Does not know: what the command does with it.
"""

from __future__ import annotations

from busllm.topology.capabilities import refuse_what_cannot_run
from busllm.topology.config import Topology
from busllm.topology.read import load_topology, parse_topology, read_text


def runnable_topology(file: str | None) -> Topology:
    """Reads a topology; None = the built-in one.

    Raises:
        ConfigError: a mistake in it, or more than this version runs.
    """
    topology = load_topology(file)
    refuse_what_cannot_run(topology, file)
    return topology


def runnable_topology_and_text(file: str | None) -> tuple[Topology, str | None]:
    """Reads a topology and gives the text that was read beside it; None for the built-in one."""
    if file is None:
        return runnable_topology(None), None
    text = read_text(file)
    topology = parse_topology(text, file)
    refuse_what_cannot_run(topology, file)
    return topology, text
