"""An owner of requests as an actor's behaviour: what a frontend and a client have in common.

Owns: the wiring between `Actor` and `RequestOwner`.
Does not know: HTTP; what else the actor does is passed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from busllm.actors.actor import Actor
from busllm.actors.behaviour import MessageHandler
from busllm.actors.directory import PeerChange
from busllm.bus.protocol import BusEvent
from busllm.errors import InvalidRequest
from busllm.requests.owner import RequestOwner


class OwnerBehaviour:
    """Behaviour of an actor that only owns requests."""

    def __init__(self, kind: str, owner: RequestOwner, *, is_unique: bool) -> None:
        self._kind = kind
        self._is_unique = is_unique
        self.owner = owner

    @property
    def kind(self) -> str:
        """See `Behaviour`."""
        return self._kind

    @property
    def is_unique(self) -> bool:
        """See `Behaviour`."""
        return self._is_unique

    async def start(self, actor: Actor) -> None:
        """See `Behaviour`."""
        self.owner.start(actor)

    def inboxes(self) -> Mapping[str, MessageHandler]:
        """See `Behaviour`."""
        return self.owner.inboxes()

    def received_all(self) -> None:
        """See `Behaviour`: readers wake up by themselves."""

    def bus_event(self, event: BusEvent) -> None:
        """See `Behaviour`."""
        self.owner.bus_event(event)

    def peer_changed(self, change: PeerChange) -> None:
        """See `Behaviour`."""
        self.owner.peer_changed(change)

    async def control(self, verb: str, question: bytes) -> bytes:
        """Answers `live`."""
        if verb != "live":
            raise InvalidRequest(f"A {self._kind} knows no control verb {verb!r}.")
        return self.owner.live_answer(question)

    def load(self) -> dict[str, float]:
        """See `Behaviour`."""
        return {"requests": float(self.owner.num_open)}

    def statistics(self) -> dict[str, Any]:
        """See `Behaviour`."""
        return {"requests": self.owner.num_open, "open_sequences": self.owner.num_open_sequences}

    async def drain(self) -> None:
        """See `Behaviour`: what is open may finish; the rest is told so."""
        self.owner.begin_drain()
        await self.owner.wait_until_idle()
