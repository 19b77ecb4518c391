"""One long prompt that arrives while others are being answered: what it does to them.

Owns: when it is sent, and which pauses of the others it may have caused.
Does not know: the load around it (`run.py`), figures (`report.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import anyio

from busllm.cli.http_target import HttpTarget
from busllm.cli.load.measured import Measured, measure


class Arrival:
    """A request that waits for its moment.

    Args:
        body: the long request.
        num_streams: how many answers must have begun before it is sent.
    """

    def __init__(self, body: bytes, num_streams: int) -> None:
        self._body = body
        self._missing = num_streams
        self._is_time = anyio.Event()
        self._streams_ended = False

    def stream_began(self) -> None:
        """Another answer has its first text."""
        self._missing -= 1
        if self._missing == 0:
            self._is_time.set()

    def streams_ended(self) -> None:
        """The others are done; if it has not been sent by now it is not sent any more."""
        self._streams_ended = not self._is_time.is_set()
        self._is_time.set()

    async def send(self, target: HttpTarget, path: str, timeout_s: float) -> Measured:
        """Waits for the moment and measures the request; every failure is noted, none raised."""
        await self._is_time.wait()
        if self._streams_ended:
            now_s = time.perf_counter()
            return Measured(
                now_s, ended_s=now_s, error="the long prompt was not sent: the others never all ran at once"
            )
        return await measure(target, path, self._body, timeout_s)


def pauses_meanwhile_ms(arrived: Measured, streams: Sequence[Measured]) -> list[float]:
    """Time between two pieces of text of the streams that are ok, in ascending order.

    Every pause counts that overlaps the time from sending the long request to the end of its answer: a stream that it
    stopped has one pause, which may have begun before it and may end after it.
    """
    pauses = (pause for one in streams if one.error is None for pause in pairwise(one.text_s))
    return sorted(
        (late - early) * 1e3 for early, late in pauses if late >= arrived.began_s and early <= arrived.ended_s
    )
