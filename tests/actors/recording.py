"""A behaviour that notes what happens to it, and the parts to run actors of it on a memory bus with a clock by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio

from busllm.actors.actor import Actor
from busllm.actors.behaviour import MessageHandler
from busllm.actors.clock import Clock
from busllm.actors.directory import PeerChange
from busllm.actors.settings import ActorSettings
from busllm.bus.protocol import Bus, BusEvent, Connection, Message
from busllm.bus.subjects import Subjects
from busllm.errors import InvalidRequest
from busllm.messages.codec import Decoder
from busllm.messages.control import Announcement, Versions, announcement_decoder
from busllm.testing.clock import settle

SUBJECTS = Subjects("test")
number_decoder: Decoder[int] = Decoder(int)


class Recording:
    """Behaviour of the tests: its work are encoded numbers.

    Attributes:
        may_start, may_end: events that `start` and `drain` wait for.
        numbers, events, changes: what came.
        faults: what handling a number raises, and, under its own name, a control verb.
    """

    is_unique = True

    def __init__(self, kind: str = "tokenizer", failure: Exception | None = None) -> None:
        self.kind = kind
        self.failure = failure
        self.may_start = anyio.Event()
        self.may_end = anyio.Event()
        self.numbers: list[int] = []
        self.faults: dict[int | str, Exception] = {}
        self.num_wakeups = 0
        self.events: list[BusEvent] = []
        self.changes: list[PeerChange] = []

    async def start(self, actor: Actor) -> None:
        self.actor = actor
        if self.failure is not None:
            raise self.failure
        await self.may_start.wait()

    def inboxes(self) -> Mapping[str, MessageHandler]:
        return {SUBJECTS.tokenize(self.actor.instance, "*"): self._work_arrived}

    def _work_arrived(self, message: Message) -> None:
        number = number_decoder.decode(message.payload)
        if number in self.faults:
            raise self.faults[number]
        self.numbers.append(number)

    def received_all(self) -> None:
        self.num_wakeups += 1

    def bus_event(self, event: BusEvent) -> None:
        self.events.append(event)

    def peer_changed(self, change: PeerChange) -> None:
        self.changes.append(change)

    async def control(self, verb: str, question: bytes) -> bytes:
        if verb in self.faults:
            raise self.faults[verb]
        if verb != "echo":
            raise InvalidRequest(f"there is no verb {verb!r}")
        return question

    def load(self) -> dict[str, float]:
        return {"requests": float(len(self.numbers))}

    def statistics(self) -> dict[str, Any]:
        return {"numbers": len(self.numbers)}

    async def drain(self) -> None:
        await self.may_end.wait()


def make_actor(behaviour: Recording, bus: Bus, clock: Clock, *, index: int = 0, model: str = "") -> Actor:
    settings = ActorSettings(cluster="test", host="here", versions=Versions(model=model))
    return Actor(behaviour, index, bus, settings, clock)


@asynccontextmanager
async def listening(bus: Bus, pattern: str) -> AsyncIterator[Connection]:
    """A connection of somebody else that hears a pattern."""
    connection = await bus.connect(name="listener", inbox="inbox.listener")
    await connection.subscribe(pattern)
    yield connection
    await connection.close()


async def announcements(connection: Connection) -> list[Announcement]:
    """What has arrived once nothing moves any more; at least one."""
    await settle()
    items = await connection.receive()
    return [announcement_decoder.decode(item.payload) for item in items if isinstance(item, Message)]
