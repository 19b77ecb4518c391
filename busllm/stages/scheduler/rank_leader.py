"""Rank 0's side of its replica: gathers the other ranks, gives them every order, ends the replica when one is gone.

Owns: who the others are, the order that not all of them have yet, and sending it again.
Does not know: what an order means to the engine (`engine/parallel/runner.py`), tensors.
Next on the path: `stages/rank/`.

`gather`, `allocate` and `plan` are called from the engine's thread and wait there; everything else happens on the event
loop. An order is sent until every rank has acknowledged it. A gap on the bus only makes that take longer, since no rank
enters a step before all have its plan.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NoReturn

import anyio
import anyio.from_thread
import anyio.lowlevel
import msgspec

from busllm.actors.actor import Actor
from busllm.actors.directory import Peer, PeerChange, PeerNews
from busllm.bus.protocol import Message
from busllm.engine.parallel.group import Group, hangs_for_s
from busllm.errors import EngineError
from busllm.messages.codec import encode
from busllm.messages.to_ranks import Allocate, Meeting, OrderTaken, RankOrder, RankStatus, Step, taken_decoder
from busllm.plan import StepPlan
from busllm.topology.ranks import RANK_KIND

RESEND_S = 0.2


class _OpenOrder:
    """An order that some ranks do not have yet."""

    def __init__(self, number: int, payload: bytes, missing: set[int]) -> None:
        self.number = number
        self.payload = payload
        self.missing = missing
        self.sent_at_s = 0.0


class RankLeader:
    """Implements `OtherRanks` over the bus.

    Args:
        replica: index of the scheduler.
        num_ranks: of the replica, this one included.
    """

    def __init__(self, replica: int, num_ranks: int) -> None:
        self._replica = replica
        self._meeting = Meeting(num_ranks)
        self._members: dict[int, str] = {}  # rank → instance, of those that have come
        self._fingerprint = ""
        self._group: Group | None = None
        self._is_complete = False
        self._next_number = 0
        self._open: _OpenOrder | None = None
        self._failure: EngineError | None = None
        self._done = threading.Event()  # the engine's thread may go on
        self._attached = threading.Event()
        self.delivered_at_s = 0.0  # when every rank had the latest order; monotonic

    # ------------------------------------------------------------ the engine's thread

    def gather(self, group: Group, address: tuple[str, int] | None, fingerprint: str) -> str:
        """Lets the other ranks come; returns when all are there.

        Args:
            group: of which a hanging operation ends the replica.
            address: host and port of the store where they meet; None = they need none.
            fingerprint: of the loaded model, which theirs has to equal.

        Returns:
            The name of this meeting.

        Raises:
            EngineError: the replica ends.
        """
        self._attached.wait()
        self._group = group
        host, port = address or (None, None)
        self._meeting = msgspec.structs.replace(self._meeting, host=host, port=port, open=True)
        self._fingerprint = fingerprint
        self._on_loop(self._look_around)
        self._wait()
        return self._actor.instance

    def allocate(self, *, num_pages: int, page_tokens: int, max_running: int, max_context_tokens: int) -> None:
        """See `OtherRanks`."""
        self._deliver(Allocate(self._next_number, num_pages, page_tokens, max_running, max_context_tokens))

    def plan(self, plan: StepPlan) -> None:
        """See `OtherRanks`."""
        self._deliver(Step(self._next_number, plan))

    def _deliver(self, order: RankOrder) -> None:
        self._next_number += 1
        self._on_loop(self._send_first, order.number, encode(order))
        self._wait()
        self.delivered_at_s = time.monotonic()

    def _on_loop(self, function: Any, *arguments: Any) -> None:
        anyio.from_thread.run_sync(function, *arguments, token=self._token)

    def _wait(self) -> None:
        self._done.wait()
        self._done.clear()
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------ the event loop

    def attach(self, actor: Actor) -> None:
        """Takes the actor that it speaks for."""
        self._actor = actor
        self._token = anyio.lowlevel.current_token()
        self._reply = f"{actor.subjects.inbox(actor.instance)}.order"

    async def run(self) -> None:
        """Sends again what is not acknowledged, until cancelled."""
        await self._actor.subscribe({self._reply: self._acknowledged})
        self._attached.set()
        while True:
            await self._actor.clock.sleep(RESEND_S / 2)
            order = self._open
            if order is not None and self._actor.clock.monotonic() - order.sent_at_s >= RESEND_S:
                self._send(order)

    @property
    def is_waiting(self) -> bool:
        """Whether not every rank has the latest order."""
        return self._open is not None

    def hangs_for_s(self) -> float | None:
        """How long the group has been in one operation, when that is longer than it may take."""
        return None if self._group is None else hangs_for_s(self._group)

    @property
    def meeting(self) -> Meeting:
        """What is announced of the replica."""
        return msgspec.structs.replace(self._meeting, here=1 + len(self._members))

    def send_again(self) -> None:
        """The bus is back."""
        if self._open is not None:
            self._send(self._open)

    def peer_changed(self, change: PeerChange) -> None:
        """Takes news of any instance.

        Raises:
            EngineError: a rank of this replica is gone; the replica ends.
        """
        status = self._status_of(change.peer)
        if status is None:
            return
        is_member = self._members.get(status.rank) == change.peer.instance
        if not self._is_complete:
            if is_member and change.news is PeerNews.GONE:
                del self._members[status.rank]
            self._look_around()
        elif is_member and change.news is PeerNews.GONE:
            self._fail(f"{change.peer.instance} (rank {status.rank}) is gone")
        elif is_member and change.news is PeerNews.DRAINING:
            self._actor.stop()  # a replica drains as a whole

    def _fail(self, reason: str) -> NoReturn:
        self._failure = EngineError(f"The replica ends: {reason}.")
        self._done.set()
        raise self._failure

    def _look_around(self) -> None:
        """Counts the ranks that have come to this meeting."""
        if not self._meeting.open:
            return
        for peer in self._actor.directory.peers():
            status = self._status_of(peer)
            if status is not None and status.leader == self._actor.instance and status.model == self._fingerprint:
                self._members[status.rank] = peer.instance
        missing = sorted(set(range(1, self._meeting.size)) - set(self._members))
        self._actor.report_progress("meeting the other ranks" if not missing else f"waiting for {self._named(missing)}")
        if not missing:
            self._is_complete = True
            self._meeting = msgspec.structs.replace(self._meeting, open=False)
            self._done.set()

    def _named(self, missing: list[int]) -> str:
        return f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"

    def _status_of(self, peer: Peer) -> RankStatus | None:
        """What a rank of this replica says; None when the peer is none, or of another version or model."""
        if peer.kind != RANK_KIND or not self._actor.directory.is_compatible(peer.announcement):
            return None
        status = msgspec.convert(peer.announcement.statistics, RankStatus)
        return status if status.replica == self._replica else None

    def _send_first(self, number: int, payload: bytes) -> None:
        self._open = _OpenOrder(number, payload, set(self._members))
        self._send(self._open)

    def _send(self, order: _OpenOrder) -> None:
        order.sent_at_s = self._actor.clock.monotonic()
        if self._actor.connection.is_connected:
            self._actor.try_publish(self._actor.subjects.plan(self._actor.instance), order.payload, self._reply)

    def _acknowledged(self, message: Message) -> None:
        order = self._open
        if message.no_responders or order is None:
            return  # nobody was there: it is sent again
        taken: OrderTaken = taken_decoder.decode(message.payload)
        if taken.number == order.number:
            order.missing.discard(taken.rank)
            if not order.missing:
                self._open = None
                self._done.set()
