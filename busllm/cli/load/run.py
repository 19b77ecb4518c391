"""A whole load: so many requests at the same time until all are done.

Owns: the workers, the clock around them, how busy this program itself was.
Does not know: figures (`report.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import anyio
import msgspec

from busllm.cli.http_target import HttpTarget
from busllm.cli.load.measured import Measured, measure


class Run(msgspec.Struct):
    """What a load brought.

    Attributes:
        began_s, ended_s: `time.perf_counter()` around it.
        busy_s: CPU time that this program used meanwhile, all threads; near the duration it was the bottleneck.
    """

    measured: list[Measured]
    began_s: float
    ended_s: float
    busy_s: float


async def run(
    target: HttpTarget,
    path: str,
    bodies: Sequence[bytes],
    *,
    concurrency: int,
    timeout_s: float,
    on_done: Callable[[Measured], None],
) -> Run:
    """Sends all requests, `concurrency` at the same time, each as soon as another is done.

    Args:
        on_done: is called after each request.
    """
    measured: list[Measured] = []
    waiting = iter(bodies)

    async def work() -> None:
        for body in waiting:  # shared: whoever is free takes the next
            one = await measure(target, path, body, timeout_s)
            measured.append(one)
            on_done(one)

    began_s, busy_s = time.perf_counter(), time.process_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(min(concurrency, len(bodies))):
            tasks.start_soon(work)
    return Run(measured, began_s, time.perf_counter(), time.process_time() - busy_s)
