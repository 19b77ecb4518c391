"""Keeps the bus server of `busllm up` running.

Owns: restarting it when it dies, with pauses and a limit.
Does not know: which server it is; `up.py` passes one of `busllm.bus.nats_server`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import anyio

from busllm.errors import BusError
from busllm.telemetry.logging import get_logger
from busllm.topology.restarts import RestartPolicy, RestartTimings


class BusServer(Protocol):
    """A bus server as a child process."""

    async def wait(self) -> int:
        """Waits for its end; returns the exit status."""
        ...

    async def restart(self) -> None:
        """Starts it again at the same address with the same secret."""
        ...


async def keep_bus_server(server: BusServer, timings: RestartTimings, give_up: Callable[[str], None]) -> None:
    """Restarts the server whenever it ends, until cancelled.

    Args:
        server: started already.
        timings: pauses and limit.
        give_up: told the reason when the limit is reached.
    """
    policy = RestartPolicy(timings)
    log = get_logger("busllm.up", process="bus server")
    ended = f"ended with status {await server.wait()}"
    while True:
        pause_s = policy.pause_s(anyio.current_time())
        if pause_s is None:
            give_up(f"the bus server {ended}, the {timings.limit + 1}th time within {timings.window_s:g} s")
            return
        log.warning("bus_server_ended", meaning=ended, restart_in_s=pause_s)
        await anyio.sleep(pause_s)
        try:
            await server.restart()
            ended = f"ended with status {await server.wait()}"
        except BusError as error:
            ended = f"does not start: {error.message}"
