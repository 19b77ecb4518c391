"""`busllm up`: starts every process that the topology places on this host.

Owns: its flags, and fetching the model before anything is started.
Does not know: processes.
Next on the path: `busllm/topology/up.py`.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import subprocess
import sys

from busllm.cli.arguments import Once, add_topology_argument
from busllm.errors import FetchFailed, ModelError
from busllm.model_store.resolve import resolve
from busllm.telemetry.logging import configure_logging
from busllm.topology.local_files import check_local_files
from busllm.topology.read import load_topology, parse_topology, read_text
from busllm.topology.supervise import EXIT_FAILURE
from busllm.topology.up import UpOptions, processes_of, run_up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_topology_argument(parser)
    parser.add_argument(
        "--host", metavar="NAME", action=Once, help="which host of the topology this is; by default this host's name"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Starts every process that the topology places on this host, restarts what fails, and prints one ready line.

    SIGTERM or Ctrl-C drains: frontends finish what runs, then the other stages stop, the bus last. A second one
    hurries.
    """
    configure_logging(os.environ.get("BUSLLM_LOG_LEVEL", "info"))
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would tell of every look at /ready
    file = arguments.topology
    text = None if file is None else read_text(file)  # read once: what runs is what was checked
    topology = load_topology(None) if text is None else parse_topology(text, file)
    options = UpOptions(topology=topology, host=arguments.host or socket.gethostname(), topology_text=text)
    check_local_files(topology, processes_of(topology, options.host))
    return run_up(options, prepare=lambda: _fetch_model(topology.model.source))


def _fetch_model(source: str) -> None:
    try:
        resolve(source)
    except ModelError:
        # A process of its own, since what is prepared beside the fetching (weights, kernels) needs torch.
        pulled = subprocess.run([sys.executable, "-m", "busllm.cli.main", "pull", source], check=False)
        if pulled.returncode == EXIT_FAILURE:
            raise FetchFailed(f"{source!r} could not be fetched; see above.") from None
        if pulled.returncode:
            raise ModelError(f"{source!r} cannot be served; see above.") from None
