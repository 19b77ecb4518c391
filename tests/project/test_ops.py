"""The files of ops/ fit the command line and the topology as they are."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from busllm.bus.nats_server import find_nats_server
from busllm.cli.arguments import Parser
from busllm.cli.main import COMMANDS, ENVIRONMENT
from busllm.cli.stage import add_arguments, stage_of
from busllm.topology.config import STAGE_KINDS
from busllm.topology.read import load_topology, parse_topology

OPS = Path(__file__).parents[2] / "ops"
KUBERNETES = [
    document for path in sorted(OPS.glob("kubernetes/*.yaml")) for document in yaml.safe_load_all(path.read_text())
]


def documents(kind: str) -> dict[str, Any]:
    return {document["metadata"]["name"]: document for document in KUBERNETES if document["kind"] == kind}


def stage_arguments(words: list[str]) -> Any:
    """The flags of `busllm stage`, read as the command reads them."""
    parser = Parser(prog="busllm stage")
    add_arguments(parser)
    return parser.parse_args(words)


def test_every_kind_of_stage_runs_in_kubernetes_with_as_many_pods_as_the_topology_says() -> None:
    topology = parse_topology(documents("ConfigMap")["busllm-topology"]["data"]["topology.toml"])
    sets = documents("StatefulSet")
    assert set(sets) == {f"busllm-{kind}" for kind in STAGE_KINDS}
    for kind in STAGE_KINDS:
        spec = sets[f"busllm-{kind}"]["spec"]
        assert spec["replicas"] == topology.count_of(kind)
        command, *words = spec["template"]["spec"]["containers"][0]["args"]
        assert command == "stage"
        arguments = stage_arguments([word.replace("$(STAGE_INDEX)", "0") for word in words])
        assert stage_of(arguments.stages[0], arguments.index, arguments.rank, topology).kind == kind


def test_the_pods_pull_the_model_of_the_topology() -> None:
    topology = parse_topology(documents("ConfigMap")["busllm-topology"]["data"]["topology.toml"])
    for pods in documents("StatefulSet").values():
        assert pods["spec"]["template"]["spec"]["initContainers"][0]["args"] == ["pull", topology.model.source]


def test_environment_variables_of_the_pods_mean_something() -> None:
    for pods in documents("StatefulSet").values():
        names = {variable["name"] for variable in pods["spec"]["template"]["spec"]["containers"][0]["env"]}
        assert {name for name in names if name.startswith("BUSLLM_")} <= set(ENVIRONMENT)


def test_nats_takes_its_configuration(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(documents("ConfigMap")["busllm-nats"]["data"]["nats.conf"])
    words = [str(find_nats_server()), "--config", str(config), "-t"]
    subprocess.run(words, env={**os.environ, "BUS_TOKEN": "t12e4"}, check=True, capture_output=True)


@pytest.mark.parametrize("path", sorted(OPS.glob("systemd/*.service")), ids=lambda path: path.name)
def test_systemd_units_start_commands_that_exist(path: Path) -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", path.read_text(), re.MULTILINE)
    _, command, *words = shlex.split(line)
    assert command in {known.name for known in COMMANDS}
    if command == "stage":
        assert stage_arguments([word.replace("%i", "scheduler:0") for word in words]).stages == ["scheduler:0"]


def test_the_image_has_a_topology_that_the_outside_can_reach() -> None:
    assert load_topology(OPS / "docker" / "topology.toml").listen_of(0) == "0.0.0.0:8000"
