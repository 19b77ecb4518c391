"""The thread of a rank: import, load and every step happen there; the event loop does bus and heartbeats only.

Owns: the orders that wait, in their sequence, and the way of an error to the event loop.
Does not know: the bus, what an order means.
Next on the path: `engine/parallel/worker.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from busllm.errors import BusllmError, EngineError
from busllm.precedence import stop_giving_way
from busllm.stages.rank.build_part import RankPart

Order = Callable[[RankPart], None]


class RankThread:
    """Runs one part. All public methods are called from the event loop.

    Args:
        make_part: loads; called in the thread.
    """

    def __init__(self, make_part: Callable[[], RankPart]) -> None:
        self._make_part = make_part
        self._orders: deque[Order] = deque()
        self._has_order = threading.Condition()
        self._is_closing = False
        self._error: BusllmError | None = None
        self._thread = threading.Thread(target=self._run, name="rank", daemon=True)
        self._loaded, self._failed = anyio.Event(), anyio.Event()
        self.part: RankPart | None = None

    async def start(self) -> RankPart:
        """Starts the thread and waits until the part is loaded; when that fails, `watch` tells."""
        self._token = anyio.lowlevel.current_token()
        self._thread.start()
        await self._loaded.wait()
        assert self.part is not None
        return self.part

    async def watch(self) -> None:
        """Raises what the thread has failed with, when it does."""
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    def send(self, order: Order) -> None:
        """Has an order executed after all before it."""
        self._orders.append(order)
        with self._has_order:
            self._has_order.notify()

    async def run(self, order: Order) -> None:
        """Has an order executed and waits for that."""
        done = anyio.Event()

        def then_say(part: RankPart) -> None:
            order(part)
            self._on_loop(done.set)

        self.send(then_say)
        await done.wait()

    async def close(self) -> None:
        """Ends the thread after what it has been told."""
        self._is_closing = True
        with self._has_order:
            self._has_order.notify()
        await anyio.to_thread.run_sync(self._thread.join, 10.0)

    def _on_loop(self, function: Callable[[], object]) -> None:
        with suppress(anyio.RunFinishedError):  # the process ends
            anyio.from_thread.run_sync(function, token=self._token)

    def _run(self) -> None:
        stop_giving_way()
        try:
            part = self.part = self._make_part()
            self._on_loop(self._loaded.set)
            while (order := self._next()) is not None:
                order(part)
            part.worker.close()
        except BaseException as error:  # noqa: BLE001 - the seam: whatever it is, the event loop decides what follows
            self._error = error if isinstance(error, BusllmError) else _as_engine_error(error)
            self._on_loop(self._failed.set)

    def _next(self) -> Order | None:
        with self._has_order:
            while not self._orders:
                if self._is_closing:
                    return None
                self._has_order.wait()
            return self._orders.popleft()


def _as_engine_error(error: BaseException) -> EngineError:
    made = EngineError(f"The rank failed: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
