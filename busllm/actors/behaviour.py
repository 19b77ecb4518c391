"""What makes an actor a particular stage.

Owns: the protocol `Behaviour`. An `Actor` runs exactly one; all calls come from its event loop, one at a time.
Next on the path: the files of `stages/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from busllm.actors.directory import PeerChange
from busllm.bus.protocol import BusEvent, Message

if TYPE_CHECKING:
    from busllm.actors.actor import Actor

MessageHandler = Callable[[Message], None]


class Behaviour(Protocol):
    """One stage's part of an actor."""

    @property
    def kind(self) -> str:
        """Stage kind, first part of the instance name."""
        ...

    @property
    def is_unique(self) -> bool:
        """Whether only one instance of this kind and index may live (true of every stage, false of clients)."""
        ...

    async def start(self, actor: Actor) -> None:
        """Gets ready: loads, starts tasks in `actor.tasks`. The actor announces `starting` meanwhile."""
        ...

    def inboxes(self) -> Mapping[str, MessageHandler]:
        """Subject patterns to subscribe to once started, each with the handler of its messages."""
        ...

    def received_all(self) -> None:
        """All messages of one wake-up were handled: send what was gathered."""
        ...

    def bus_event(self, event: BusEvent) -> None:
        """The connection was lost, came back, or dropped messages."""
        ...

    def peer_changed(self, change: PeerChange) -> None:
        """News of another instance."""
        ...

    async def control(self, verb: str, question: bytes) -> bytes:
        """Answers `control.<instance>.<verb>`; raises `BusllmError` for an error answer."""
        ...

    def load(self) -> dict[str, float]:
        """Small numbers for routing."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Counts for people, metrics and tests."""
        ...

    async def drain(self) -> None:
        """Finishes what runs; nothing new comes any more."""
        ...
