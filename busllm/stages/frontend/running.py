"""The exchanges that run now, and the end of taking new ones.

Owns: which exchanges are open; the drain: nothing new from its beginning on, what runs may finish, what is left at
its end is told so.
Does not know: signals and sockets (`server.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from busllm.errors import Draining
from busllm.stages.frontend.exchange import Exchange


class RunningExchanges:
    """Open exchanges of one frontend."""

    def __init__(self) -> None:
        self._open: set[Exchange] = set()
        self._late: set[Exchange] = set()
        self._draining = False
        self._finished = anyio.Event()

    def __len__(self) -> int:
        """Exchanges that run and began before the drain."""
        return len(self._open)

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return self._draining

    @contextmanager
    def entered(self, exchange: Exchange) -> Iterator[None]:
        """Counts an exchange while it runs."""
        # Requests that come during a drain are refused at once and never prolong it.
        runs = self._late if self._draining else self._open
        runs.add(exchange)
        try:
            yield
        finally:
            runs.discard(exchange)
            self._note_finished()

    def begin_drain(self) -> None:
        """From now on new requests are refused and every answer closes its connection."""
        self._draining = True
        self._note_finished()

    async def wait_finished(self) -> None:
        """Waits until nothing runs that began before the drain."""
        await self._finished.wait()

    def end_all(self) -> None:
        """Ends what still runs with an error that says why."""
        for exchange in [*self._open, *self._late]:
            exchange.stop(Draining("The server is shutting down and the time to finish is over. Send it again."))

    def _note_finished(self) -> None:
        if self._draining and not self._open:
            self._finished.set()
