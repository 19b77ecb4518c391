"""The behaviour of a rank behind the first: it follows rank 0's orders, and ends when rank 0 is gone.

Owns: finding rank 0, taking orders in sequence, acknowledging them.
Does not know: sequences, pages, text; what an order computes (`engine/parallel/worker.py`).
Next on the path: `rank_thread.py`.

An order is acknowledged as soon as it is here, not when it is done: rank 0 opens the door to a step once all ranks have
its plan. What comes twice is acknowledged twice; what comes too early is left to be sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, assert_never

import anyio
import msgspec

from busllm.actors.actor import Actor
from busllm.actors.behaviour import MessageHandler
from busllm.actors.directory import Peer, PeerChange, PeerNews
from busllm.bus.protocol import BusEvent, Message
from busllm.engine.parallel.group import hangs_for_s
from busllm.errors import EngineError, InvalidRequest
from busllm.messages.codec import encode
from busllm.messages.parts import Joiner, Part
from busllm.messages.to_ranks import Allocate, Meeting, OrderTaken, RankOrder, RankStatus, Step, decoder
from busllm.stages.rank.build_part import RankPart
from busllm.stages.rank.rank_thread import RankThread
from busllm.topology.ranks import RANK_KIND

_LEADER_KIND = "scheduler"


class RankStage:
    """Behaviour of a rank behind the first.

    Args:
        replica, rank: which.
        make_part: loads its part of the model; called in the rank's thread.
    """

    kind = RANK_KIND
    is_unique = True

    def __init__(self, replica: int, rank: int, make_part: Callable[[], RankPart]) -> None:
        self._status = RankStatus(replica, rank)
        self._thread = RankThread(make_part)
        self._joiner = Joiner()
        self._next_number = 0
        self._is_draining = False
        self._news = anyio.Event()
        self._leader_is_gone = anyio.Event()

    async def start(self, actor: Actor) -> None:
        """See `Behaviour`."""
        self._actor = actor
        actor.report_progress("loading its part of the model")
        actor.tasks.start_soon(self._thread.watch)
        part = await self._thread.start()
        self._status = msgspec.structs.replace(self._status, model=part.worker.model.fingerprint)
        actor.report_progress("waiting for rank 0")
        leader, meeting = await self._find_leader()
        await actor.subscribe({actor.subjects.plan(leader): self._order_arrived})
        self._status = msgspec.structs.replace(self._status, leader=leader)
        actor.report_progress("meeting the other ranks")
        actor.tasks.start_soon(self._hang_watch, part)
        await self._thread.run(lambda part: part.connect(meeting.host, meeting.port, leader))

    def inboxes(self) -> Mapping[str, MessageHandler]:
        """See `Behaviour`: it has been listening to rank 0 since they met."""
        return {}

    def received_all(self) -> None:
        """See `Behaviour`."""

    def load(self) -> dict[str, float]:
        """See `Behaviour`: nobody chooses among ranks."""
        return {}

    def statistics(self) -> dict[str, Any]:
        """See `Behaviour`."""
        part = self._thread.part
        steps = 0 if part is None else part.worker.num_steps
        return dict(msgspec.to_builtins(msgspec.structs.replace(self._status, steps=steps)))

    async def drain(self) -> None:
        """See `Behaviour`: rank 0 needs it for as long as it runs."""
        self._is_draining = True
        if self._status.leader is not None and self._actor.directory.get(self._status.leader) is not None:
            await self._leader_is_gone.wait()

    async def control(self, verb: str, question: bytes) -> bytes:
        """See `Behaviour`."""
        raise InvalidRequest(f"A rank knows no control verb {verb!r}.")

    def bus_event(self, event: BusEvent) -> None:
        """See `Behaviour`: what was lost in a gap is sent again."""

    def peer_changed(self, change: PeerChange) -> None:
        """See `Behaviour`."""
        self._news.set()
        if change.news is PeerNews.GONE and change.peer.instance == self._status.leader:
            self._leader_is_gone.set()
            if not self._is_draining:
                raise EngineError(f"The replica ends: {change.peer.instance} (rank 0) is gone.")

    # ------------------------------------------------------------ meeting

    async def _find_leader(self) -> tuple[str, Meeting]:
        """Waits until rank 0 of this replica lets the others come."""
        while True:
            for peer in self._actor.directory.peers():
                meeting = self._meeting_of(peer)
                if meeting is not None and meeting.open:
                    return peer.instance, meeting
            self._news = anyio.Event()
            await self._news.wait()

    def _meeting_of(self, peer: Peer) -> Meeting | None:
        announced = peer.announcement
        if (peer.kind, announced.index) != (_LEADER_KIND, self._status.replica):
            return None
        same_topology = announced.versions.topology == self._actor.settings.versions.topology
        if not same_topology or not self._actor.directory.is_compatible(announced):
            return None
        ranks = announced.statistics.get("ranks")
        return None if ranks is None else msgspec.convert(ranks, Meeting)

    # ------------------------------------------------------------ orders

    def _order_arrived(self, message: Message) -> None:
        order = decoder.decode(message.payload)
        if isinstance(order, Part):
            whole = self._joiner.add(order)
            order = decoder.decode(whole) if whole is not None else order
        if isinstance(order, Part) or order.number > self._next_number:
            return
        if order.number == self._next_number:
            self._next_number += 1
            self._execute(order)
        if message.reply is not None:
            self._actor.try_publish(message.reply, encode(OrderTaken(self._status.rank, order.number)))

    def _execute(self, order: RankOrder) -> None:
        match order:
            case Allocate():
                sizes = msgspec.structs.asdict(order)
                del sizes["number"]
                self._thread.send(lambda part: part.worker.allocate(**sizes))
            case Step():
                plan = order.plan
                self._thread.send(lambda part: part.worker.plan(plan))
            case _:
                assert_never(order)

    async def _hang_watch(self, part: RankPart) -> None:
        while True:
            await self._actor.clock.sleep(self._actor.settings.timings.heartbeat_s)
            lasted_s = hangs_for_s(part.group)
            if lasted_s is not None:
                raise EngineError(f"The replica ends: the ranks have been in one operation for {lasted_s:.0f} s.")
