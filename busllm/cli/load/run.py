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
from busllm.cli.load.arrival import Arrival
from busllm.cli.load.measured import Measured, measure


class Run(msgspec.Struct):
    """What a load brought.

    Attributes:
        began_s, ended_s: `time.perf_counter()` around it.
        busy_s: CPU time that this program used meanwhile, all threads; near the duration it was the bottleneck.
        arrived: the long request that came among the others; None when there was none.
    """

    measured: list[Measured]
    began_s: float
    ended_s: float
    busy_s: float
    arrived: Measured | None = None


async def run(
    target: HttpTarget,
    path: str,
    bodies: Sequence[bytes],
    *,
    concurrency: int,
    timeout_s: float,
    on_done: Callable[[Measured], None],
    arriving_body: bytes | None = None,
) -> Run:
    """Sends all requests, `concurrency` at the same time, each as soon as another is done.

    Args:
        on_done: is called after each request.
        arriving_body: a request that is sent when as many answers have begun as run at the same time. The clock stops
            when it is done too.
    """
    measured: list[Measured] = []
    arrived: list[Measured] = []
    waiting = iter(bodies)
    num_workers = min(concurrency, len(bodies))
    arrival = None if arriving_body is None else Arrival(arriving_body, num_workers)

    async def work() -> None:
        for body in waiting:  # shared: whoever is free takes the next
            if arrival is None:
                one = await measure(target, path, body, timeout_s)
            else:
                one = await measure(target, path, body, timeout_s, arrival.stream_began)
            measured.append(one)
            on_done(one)
            if arrival is not None and len(measured) == len(bodies):
                arrival.streams_ended()

    async def arrive(arrival: Arrival) -> None:
        arrived.append(await arrival.send(target, path, timeout_s))

    began_s, busy_s = time.perf_counter(), time.process_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(num_workers):
            tasks.start_soon(work)
        if arrival is not None:
            tasks.start_soon(arrive, arrival)
    ended_s, used_s = time.perf_counter(), time.process_time() - busy_s
    return Run(measured, began_s, ended_s, used_s, arrived[0] if arrived else None)
