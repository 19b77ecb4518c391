"""A real NATS server for tests: it can be killed, frozen and made to refuse subjects.

Owns: `RefusingNatsServer` and `NatsHarness`, the harness that runs the bus conformance suite on it.
Does not know: the tests.
"""

from __future__ import annotations

import os
import signal

import anyio.to_thread

from busllm.bus.nats import NatsBus
from busllm.bus.nats_options import NatsOptions
from busllm.bus.nats_server import EmbeddedNatsServer
from busllm.bus.protocol import Bus
from busllm.bus.queue import QueueBounds
from busllm.bus.retry import RetryTimings
from busllm.testing.bus_harness import REFUSED_PREFIX, Connections

QUICK_RETRY = RetryTimings(first_pause_s=0.02, max_pause_s=0.1)


class RefusingNatsServer(EmbeddedNatsServer):
    """The embedded server with one user, who may neither publish nor subscribe to `refused.>`."""

    @property
    def credentials(self) -> str:
        """User and password."""
        return f"tester:{super().credentials}"

    def authorization(self) -> str:
        """The `authorization` block of the configuration."""
        refused = f'{{ deny: ["{REFUSED_PREFIX}.>"] }}'
        password = super().credentials
        permissions = f"{{ publish: {refused}, subscribe: {refused} }}"
        return f'authorization {{ users: [{{ user: tester, password: "{password}", permissions: {permissions} }}] }}'

    def signal(self, number: signal.Signals) -> None:
        """Sends the server a signal."""
        assert self.pid is not None, "the server does not run"
        os.kill(self.pid, number)


class NatsHarness(Connections):
    """A `BusHarness` on a server that outlives it."""

    refused_prefix = REFUSED_PREFIX

    def __init__(self, server: RefusingNatsServer) -> None:
        super().__init__()
        self.server = server

    def bus(self, bounds: QueueBounds) -> Bus:
        """A bus that reconnects quickly."""
        return NatsBus(NatsOptions(urls=(self.server.url,), bounds=bounds, retry=QUICK_RETRY))

    async def cut(self) -> None:
        """Kills the server."""
        self.server.signal(signal.SIGKILL)
        await self.server.wait()

    async def mend(self) -> None:
        """Starts it on the same port."""
        await self.server.restart()

    async def freeze(self) -> None:
        """Stops its process; all its threads stand still when this returns."""
        self.server.signal(signal.SIGSTOP)
        assert self.server.pid is not None
        await anyio.to_thread.run_sync(os.waitid, os.P_PID, self.server.pid, os.WSTOPPED | os.WNOWAIT)

    async def thaw(self) -> None:
        """Lets its process go on."""
        self.server.signal(signal.SIGCONT)

    async def close(self) -> None:
        """Leaves a running server and no connection behind."""
        if self.server.pid is None:
            await self.mend()
        await self.thaw()
        await super().close()
