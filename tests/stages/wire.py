"""One stage on a memory bus, and everybody else played by the test on one connection that hears everything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from busllm.actors.actor import Actor
from busllm.actors.behaviour import Behaviour
from busllm.actors.clock import Timings
from busllm.actors.settings import ActorSettings
from busllm.bus.memory import MemoryBus
from busllm.bus.protocol import Connection, Message
from busllm.bus.subjects import Subjects
from busllm.messages.codec import Decoder, encode, encode_json
from busllm.messages.control import Announcement, StageState
from busllm.telemetry.trace import TraceLevel
from busllm.testing.clock import ManualClock, settle

SUBJECTS = Subjects("test")
FRONTEND = "frontend-0-aaaaaaaa"
SCHEDULER = "scheduler-0-bbbbbbbb"
DETOKENIZER = "detokenizer-0-cccccccc"
PATIENCE_S = 10.0


class Wire:
    """The other end of everything that one stage sends.

    Attributes:
        actor: the stage under test.
        clock: of the stage; it stands still.
        heard: every message on the bus, in order.
    """

    def __init__(self, actor: Actor, connection: Connection, clock: ManualClock) -> None:
        self.actor = actor
        self.clock = clock
        self.connection = connection
        self.heard: list[Message] = []
        self._more = anyio.Event()

    async def listen(self) -> None:
        """Notes what is said, until cancelled."""
        while True:
            self.heard += [item for item in await self.connection.receive() if isinstance(item, Message)]
            self._more.set()
            self._more = anyio.Event()

    def said(self, prefix: str) -> list[Message]:
        """What was published under subjects that begin so."""
        return [message for message in self.heard if message.subject.startswith(prefix)]

    async def wait_for(self, prefix: str, number: int = 1) -> list[Message]:
        """Waits until so many messages were published there."""
        with anyio.fail_after(PATIENCE_S):
            while len(self.said(prefix)) < number:
                await self.next_message()
        return self.said(prefix)

    async def next_message(self) -> None:
        """Waits until something more is said."""
        await self._more.wait()

    async def replies(self, decoder: Decoder[Any], number: int, uid: str = "*") -> list[Any]:
        """Waits for so many replies to the frontend and decodes them."""
        prefix = SUBJECTS.reply(FRONTEND, "") if uid == "*" else SUBJECTS.reply(FRONTEND, uid)
        return [decoder.decode(message.payload) for message in await self.wait_for(prefix, number)]

    def send(self, subject: str, message: Any, reply: str | None = None) -> None:
        """Publishes an encoded message to the stage."""
        self.connection.publish(subject, encode(message), reply)

    async def abort(self, uid: str, payload: bytes = b"") -> None:
        """Publishes an abort and lets the stage take it."""
        self.connection.publish(SUBJECTS.abort(uid), payload)
        await self.settle()

    async def announce(self, instance: str, state: StageState = StageState.READY, requests: float = 0.0) -> None:
        """Plays the heartbeat of another stage."""
        kind, index, _ = instance.split("-")
        announcement = Announcement(kind, int(index), instance, "there", 1, state, load={"requests": requests})
        self.connection.publish(SUBJECTS.stage(kind, instance), encode_json(announcement))
        await self.settle()

    async def ask(self, verb: str, question: Any = None) -> Any:
        """Asks the stage a control verb."""
        payload = b"" if question is None else encode_json(question)
        subject = SUBJECTS.control(self.actor.instance, verb)
        return json.loads(await self.connection.request(subject, payload, timeout_s=PATIENCE_S))

    async def settle(self) -> None:
        """Lets everything on the event loop happen that can."""
        await settle()

    async def until(self, condition: Any) -> None:
        """Waits for what another thread brings about, and hears what was said by then."""
        with anyio.fail_after(PATIENCE_S):
            while not condition():
                await anyio.sleep(0.005)
        await self.settle()

    def statistics(self) -> dict[str, Any]:
        """Counts of the stage."""
        return self.actor.announcement().statistics

    def events(self, uid: str) -> list[str]:
        """Names of the stage's trace events of a request."""
        return [event.event for event in self.actor.trace.events_of(uid)]


@asynccontextmanager
async def running(
    behaviour: Behaviour, *, trace_level: TraceLevel = TraceLevel.REQUESTS, max_payload_bytes: int = 1 << 20
) -> AsyncIterator[Wire]:
    """Runs a stage until the block ends; the frontend has announced itself."""
    bus, clock = MemoryBus(max_payload_bytes=max_payload_bytes), ManualClock()
    settings = ActorSettings(cluster="test", host="here", timings=Timings(), trace_level=trace_level)
    actor = Actor(behaviour, 0, bus, settings, clock)
    connection = await bus.connect(name="wire", inbox="inbox.wire")
    await connection.subscribe("busllm.test.>")
    async with anyio.create_task_group() as tasks:
        wire = Wire(actor, connection, clock)
        tasks.start_soon(wire.listen)
        tasks.start_soon(actor.run)
        with anyio.fail_after(PATIENCE_S):
            await actor.ready.wait()
        await wire.announce(FRONTEND)
        try:
            yield wire
        finally:
            tasks.cancel_scope.cancel()
