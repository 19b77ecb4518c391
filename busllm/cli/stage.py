"""`busllm stage KIND[:INDEX[.RANK]] …`: what `up` spawns, and what systemd or Kubernetes run.

Owns: its flags, and the environment by which `up` passes the bus and the listening sockets.
Does not know: stages.
Next on the path: `busllm/stages/process.py`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping

from busllm.cli.arguments import Once, add_topology_argument
from busllm.errors import ConfigError
from busllm.topology.child import BUS_URL_VARIABLE, LISTEN_FDS_VARIABLE
from busllm.topology.config import STAGE_KINDS, Topology
from busllm.topology.nearest import nearest
from busllm.topology.placement import StageId, matching, parse_stage
from busllm.topology.read import load_topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "stages",
        metavar="KIND[:INDEX[.RANK]]",
        nargs="+",
        help="frontend, tokenizer, scheduler or detokenizer; index and rank are 0 unless given; several share it",
    )
    add_topology_argument(parser)
    parser.add_argument("--index", metavar="N", action=Once, help="index of a stage that is named without one")
    parser.add_argument("--rank", metavar="R", action=Once, help="rank of a scheduler that is named without one")


def execute(arguments: argparse.Namespace) -> int:
    """Runs stages of a cluster in this process, until SIGTERM or SIGINT drains them.

    The bus is the one of the topology file, or of the environment variable BUSLLM_BUS_URL where that is set.
    """
    topology = load_topology(arguments.topology)
    stages = tuple(stage_of(text, arguments.index, arguments.rank, topology) for text in arguments.stages)
    if len(set(stages)) < len(stages):
        raise ConfigError("a stage is named twice.", key="stage")
    bus_url = os.environ.get(BUS_URL_VARIABLE) or topology.bus.url
    if topology.bus.kind == "nats" and bus_url is None:
        raise ConfigError(
            f"is missing: only `busllm up` starts a bus server. Name one there or in {BUS_URL_VARIABLE}.",
            file=arguments.topology,
            key="bus.url",
        )
    from busllm.stages.process import run_stages  # imports the stages' code

    return run_stages(
        topology, stages, bus_url=bus_url, listen_fds=listen_fds(os.environ), topology_file=arguments.topology
    )


def stage_of(text: str, index: str | None, rank: str | None, topology: Topology) -> StageId:
    """The stage that a word of the command line names.

    Raises:
        ConfigError: there is no such stage in the topology.
    """
    full = text
    if index is not None and ":" not in full:
        full += f":{index}"
    if rank is not None and "." not in full:
        full += f".{rank}" if ":" in full else f":0.{rank}"
    try:
        pattern = parse_stage(full)
    except ValueError as error:
        suggestion = nearest(full.partition(":")[0], STAGE_KINDS)
        raise ConfigError(f"{error}.", key="stage", suggestion=suggestion) from error
    stage = StageId(pattern.kind, pattern.index or 0, pattern.rank or 0)
    if stage not in matching(topology, pattern):
        raise ConfigError(f"the topology has no {stage}; {stage.kind}.count says how many there are.", key="stage")
    return stage


def listen_fds(environment: Mapping[str, str]) -> dict[int, int]:
    """The inherited listening sockets, file descriptors by frontend index.

    Raises:
        ConfigError: the variable has another form.
    """
    text = environment.get(LISTEN_FDS_VARIABLE, "{}")
    try:
        return {int(index): int(fd) for index, fd in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f'is {text!r}; it must look like {{"0": 3}}.', key=LISTEN_FDS_VARIABLE) from error
