"""Requests of one connection and the replies to them.

Owns: the numbered subjects under the connection's inbox, and matching a reply to the task that waits for it.
Does not know: how anything is published or delivered.
Next on the path: `bus/memory.py` and `bus/nats.py`, which hand every message under the inbox to `deliver`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import anyio

from busllm.bus.protocol import Message
from busllm.errors import BusDown, NoResponders, ReplyTimeout


class _Waiter:
    """One request that is under way."""

    __slots__ = ("arrived", "outcome")

    def __init__(self) -> None:
        self.arrived = anyio.Event()
        self.outcome: Message | BusDown | None = None

    def settle(self, outcome: Message | BusDown) -> None:
        if self.outcome is None:  # the first one counts
            self.outcome = outcome
            self.arrived.set()


class Inbox:
    """Where a connection's requests are answered.

    Args:
        prefix: subject prefix that no other connection uses.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._num_requests = 0
        self._waiters: dict[str, _Waiter] = {}

    @property
    def pattern(self) -> str:
        """What the connection subscribes to."""
        return f"{self.prefix}.>"

    def deliver(self, message: Message) -> None:
        """Hands a reply to its request; one that nobody waits for any more is dropped."""
        waiter = self._waiters.get(message.subject)
        if waiter is not None:
            waiter.settle(message)

    def fail_all(self, reason: str) -> None:
        """Ends all requests under way with `BusDown`: their replies may have been lost."""
        for waiter in self._waiters.values():
            waiter.settle(BusDown(reason))

    async def request(
        self, publish: Callable[[str, bytes, str], None], subject: str, payload: bytes, timeout_s: float
    ) -> bytes:
        """Publishes a request and waits for the first reply.

        Raises:
            NoResponders: nobody subscribes to the subject.
            ReplyTimeout: no reply within `timeout_s`.
            BusDown: the connection was lost or closed meanwhile.
        """
        self._num_requests += 1
        reply = f"{self.prefix}.{self._num_requests}"
        waiter = self._waiters[reply] = _Waiter()
        try:
            publish(subject, payload, reply)
            with anyio.move_on_after(timeout_s):
                await waiter.arrived.wait()
        finally:
            del self._waiters[reply]
        outcome = waiter.outcome
        match outcome:
            case None:
                raise ReplyTimeout(f"no reply to a request on {subject!r} within {timeout_s:g} s.")
            case BusDown() as lost:
                raise lost
            case Message(no_responders=True):
                raise NoResponders(f"nobody listens to {subject!r}.")
            case Message():
                return outcome.payload
            case _:
                assert_never(outcome)
