"""How much this load generator itself can take.

Owns: a run against `canned_server.py`, which does nothing but send.
Does not know: what the figure is compared with.
"""

from __future__ import annotations

import subprocess
import sys

import anyio
import msgspec

from busllm.cli.http_target import HttpFailure, HttpTarget
from busllm.cli.load.run import run
from busllm.cli.load.workload import Workload

EVENTS_PER_ANSWER = 500


class Ceiling(msgspec.Struct, frozen=True):
    """What the generator can take.

    Attributes:
        events_per_s: that were received; the server, a second process, may have been slower than this program.
        events_per_busy_s: per second of this program's own CPU time: its ceiling on one core.
    """

    events_per_s: float
    events_per_busy_s: float


async def measure_ceiling(workload: Workload, concurrency: int) -> Ceiling:
    """Runs a workload's requests against a server that answers at once.

    Raises:
        HttpFailure: a request failed.
    """
    command = [sys.executable, "-m", "busllm.cli.load.canned_server", str(EVENTS_PER_ANSWER)]
    async with await anyio.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None) as server:
        assert server.stdout is not None and server.stdin is not None
        port = int(await server.stdout.receive())
        target = HttpTarget(f"http://127.0.0.1:{port}", None)
        done = await run(
            target,
            workload.path,
            workload.bodies("canned"),
            concurrency=concurrency,
            timeout_s=60.0,
            on_done=lambda _: None,
        )
        await server.stdin.aclose()
        await server.wait()
    failed = [one.error for one in done.measured if one.error is not None]
    if failed:
        raise HttpFailure(f"{len(failed)} requests to the canned server failed: {failed[0]}")
    num_events = sum(len(one.text_s) for one in done.measured)
    return Ceiling(
        events_per_s=round(num_events / (done.ended_s - done.began_s)),
        events_per_busy_s=round(num_events / done.busy_s),
    )
