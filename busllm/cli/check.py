"""`busllm check`: looks a topology file over and shows what it makes.

Owns: the table of processes and the lines about ports, model and KV size; the dump of all values in force.
Does not know: which mistakes there are (`busllm/topology/`).
"""

from __future__ import annotations

import argparse
import socket

import msgspec
from rich.console import Console
from rich.table import Table

from busllm.bus.connect import BUILT_IN_KINDS
from busllm.bus.nats_options import public_url
from busllm.cli.arguments import add_topology_argument
from busllm.cli.start_checks import check_attention, check_model
from busllm.errors import ConfigError, ModelError
from busllm.model_store.aliases import ALIASES
from busllm.model_store.files import ModelFiles
from busllm.model_store.resolve import is_hub_id, resolve
from busllm.registry import plugin_names
from busllm.topology.config import Topology, topology_hash
from busllm.topology.local_files import check_local_files
from busllm.topology.model_fit import attention_shape, kv_size_text
from busllm.topology.nearest import nearest
from busllm.topology.placement import PlacedProcess, place
from busllm.topology.read import load_topology, read_text
from busllm.topology.toml_lines import KeyLines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_topology_argument(parser)
    parser.add_argument("--values", action="store_true", help="print every value in force, as JSON, instead")


def execute(arguments: argparse.Namespace) -> int:
    """Checks a topology file and prints processes, hosts, ports and the size of the KV cache.

    A mistake ends it with status 2, naming file, line, key and the nearest right one. What a start would say of a model
    is said too, when the model is on this host, but for what takes its weights to see.
    """
    topology = load_topology(arguments.topology)
    try:
        files, model = _check(topology)
    except ConfigError as error:
        error.file = error.file or arguments.topology
        error.line = _line_of(error)
        raise
    shape = None if files is None else attention_shape(files)
    if arguments.values:
        print(msgspec.json.format(msgspec.json.encode(_without_secrets(topology))).decode())
        return 0
    console = Console(highlight=False, markup=False)
    console.print(_process_table(topology))
    bus = topology.bus
    server = _public(bus.url) or ("started by `busllm up`" if bus.kind == "nats" else "inside the process")
    for line in (
        f"cluster    {topology.cluster} (topology {topology_hash(topology)})",
        f"bus        {bus.kind}, {server}",
        f"model      {model}",
        f"KV cache   {kv_size_text(topology.scheduler, shape, topology.model.dtype)} per scheduler",
    ):
        console.print(line, soft_wrap=True)
    return 0


def _line_of(error: ConfigError) -> int | None:
    """Where in its file the key of a mistake is, which was found after reading."""
    if error.file is None or error.key is None:
        return error.line
    return error.line or KeyLines(read_text(error.file)).find(tuple(error.key.split(".")))


def _check(topology: Topology) -> tuple[ModelFiles | None, str]:
    """What `up` on this host would find missing or impossible.

    Returns:
        The model's files, None when they are not here; and a word on the model.

    Raises:
        ConfigError: the plug-in of the bus or of attention, a file that the topology names, or a setting that the model
            does not allow.
        ModelError: the model cannot be served.
    """
    installed = (*BUILT_IN_KINDS, *plugin_names("busllm.bus"))
    if topology.bus.kind not in installed:
        raise ConfigError(
            f"is {topology.bus.kind!r}, which is neither built in nor an installed plug-in.",
            key="bus.kind",
            suggestion=nearest(topology.bus.kind, installed),
        )
    here = [placed for placed in place(topology, socket.gethostname()) if placed.host == socket.gethostname()]
    check_local_files(topology, here)
    files, model = _model(topology)
    computes_here = any(placed.holds("scheduler") for placed in here)
    if computes_here and not (files is not None and files.is_null):
        check_attention(topology)
    if files is not None:
        check_model(topology, files, computes_here=computes_here)
    return files, model


def _without_secrets(topology: Topology) -> Topology:
    return msgspec.structs.replace(topology, bus=msgspec.structs.replace(topology.bus, url=_public(topology.bus.url)))


def _public(urls: str | None) -> str | None:
    """Bus URLs without token, user and password."""
    return None if urls is None else ",".join(public_url(url.strip()) for url in urls.split(","))


def _model(topology: Topology) -> tuple[ModelFiles | None, str]:
    """The model's files when they are here, and a word on it."""
    source = topology.model.source
    try:
        files = resolve(source)
    except ModelError as error:
        if source in ALIASES or is_hub_id(source):
            return None, f"{source}, not on this host: {error.message}"  # it can be fetched
        raise ConfigError(error.message, key="model.source") from error
    name = topology.model.name or files.name
    return files, name if files.is_null else f"{name}, {files.gguf or files.directory}"


def _process_table(topology: Topology) -> Table:
    table = Table("host", "process", "listens on", box=None, pad_edge=False)
    for placed in place(topology, socket.gethostname()):
        table.add_row(placed.host, " ".join(map(str, placed.stages)), ", ".join(_addresses(topology, placed)) or "-")
    return table


def _addresses(topology: Topology, placed: PlacedProcess) -> list[str]:
    return list(dict.fromkeys(topology.listen_of(index) for index in placed.frontend_indexes))
