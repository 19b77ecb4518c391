"""`busllm env`: lets stock NATS tools reach a cluster.

Owns: the variables that the `nats` command line reads.
Does not know: what the tools do. Prints a secret: it is for `eval "$(busllm env)"`.
"""

from __future__ import annotations

import argparse
import shlex

from busllm.cli.arguments import add_cluster_arguments
from busllm.cli.cluster import Target, find_target
from busllm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_cluster_arguments(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Prints the variables by which stock NATS tools reach the cluster:

    eval "$(busllm env)"
    nats sub 'busllm.local.trace.>'
    """
    for name, value in variables(find_target(arguments)).items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def variables(target: Target) -> dict[str, str]:
    """The variables.

    Raises:
        ConfigError: the cluster's bus is no NATS.
    """
    target.need_bus()
    if target.bus.kind != "nats" or target.bus_url is None:
        raise ConfigError(f"cluster {target.cluster!r} runs on the {target.bus.kind} bus; NATS tools do not speak it.")
    found = {"NATS_URL": target.bus_url}
    if target.bus.credentials is not None:
        found["NATS_CREDS"] = target.bus.credentials
    if target.bus.tls is not None:
        files = {
            "NATS_CA": target.bus.tls.ca_file,
            "NATS_CERT": target.bus.tls.certificate_file,
            "NATS_KEY": target.bus.tls.key_file,
        }
        found |= {name: file for name, file in files.items() if file is not None}
    return found
