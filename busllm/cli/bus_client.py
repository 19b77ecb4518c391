"""A `busllm.Client` for the cluster that the arguments name, and the arguments that are uids.

Owns: the life of the client around one command; reading uids as they are found in bodies, headers and logs.
Does not know: what the command does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Awaitable, Callable

import anyio

from busllm.cli.cluster import find_target
from busllm.client import Client, ClientOptions
from busllm.ids import is_uid
from busllm.telemetry.logging import configure_logging

# Whoever types a command waits for it; a bus that is there takes milliseconds.
CONNECT_WAIT_S = 5.0
_BODY_PREFIXES = ("chatcmpl-", "cmpl-")


def run_with_client(arguments: argparse.Namespace, use: Callable[[Client], Awaitable[int]]) -> int:
    """Runs `use` with a connected client and returns what it returns, the exit status.

    Raises:
        ConfigError: no cluster was found, or it runs on a memory bus.
        BusUnavailable: its bus cannot be reached.
    """
    configure_logging(os.environ.get("BUSLLM_LOG_LEVEL", "error"))
    target = find_target(arguments)
    client = Client(target.open_bus(), cluster=target.cluster, options=ClientOptions(connect_wait_s=CONNECT_WAIT_S))

    async def life() -> int:
        async with client:
            return await use(client)

    return anyio.run(life)


def uid(text: str) -> str:
    """A uid as an argument: as it is, or as the `id` of an answer's body.

    Raises:
        argparse.ArgumentTypeError: it has another form.
    """
    bare = text
    for prefix in _BODY_PREFIXES:
        bare = bare.removeprefix(prefix)
    if not is_uid(bare):
        raise argparse.ArgumentTypeError(f"{text!r} is no uid: 20 of the letters a to z and the digits 2 to 7")
    return bare
