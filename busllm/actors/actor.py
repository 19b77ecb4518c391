"""The run loop of an actor: one connection, one mailbox, one behaviour, a status that others hear.

Owns: connecting, subscribing, the receive loop, the order of starting and stopping.
Does not know: any stage (`Behaviour`), message types of the data path.
Next on the path: `presence.py` (how it is seen), `control.py` (what it is asked), the behaviour (what it does).

Life: connect → hear others, announce `starting` → behaviour.start → subscribe to work, flush → announce `ready` →
… → stop: announce `draining`, behaviour.drain, announce `gone`, close.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import assert_never

import anyio
import anyio.abc

from busllm.actors.behaviour import Behaviour, MessageHandler
from busllm.actors.clock import Clock
from busllm.actors.control import ENDS_THE_ACTOR, answer_control, internal_error, send_answer
from busllm.actors.directory import Directory
from busllm.actors.presence import Place, Presence
from busllm.actors.settings import ActorSettings
from busllm.bus.protocol import (
    Bus,
    BusEvent,
    Connection,
    Disconnected,
    Message,
    Overflow,
    PermissionRefused,
    Reconnected,
)
from busllm.bus.subjects import Subjects
from busllm.errors import BusCongested, BusDown, BusError, BusllmError, MalformedMessage, PayloadTooLarge
from busllm.ids import new_instance
from busllm.messages.codec import encode_json
from busllm.messages.control import Announcement, StageState, error_answer
from busllm.messages.parts import split
from busllm.telemetry.logging import get_logger
from busllm.telemetry.trace import TraceEvent, TraceRecorder

__all__ = ["Actor", "ActorSettings"]


class Actor:
    """Runs one behaviour under an instance name of its own."""

    def __init__(self, behaviour: Behaviour, index: int, bus: Bus, settings: ActorSettings, clock: Clock) -> None:
        self.instance = new_instance(behaviour.kind, index)
        self.settings = settings
        self.clock = clock
        self.subjects = Subjects(settings.cluster)
        self.trace = TraceRecorder(behaviour.kind, self.instance, settings.trace_level, self._publish_trace)
        self.log = get_logger("busllm.actor", stage=behaviour.kind, instance=self.instance)
        self.ready = anyio.Event()
        self._behaviour = behaviour
        place = Place(behaviour.kind, index, self.instance)
        self._presence = Presence(place, behaviour, settings, clock, self._send_presence)
        self._bus = bus
        self._stop = anyio.Event()
        self._drain_scope: anyio.CancelScope | None = None
        self._drain_until_s = math.inf  # on the event loop's clock
        self._handlers: dict[int, MessageHandler] = {}
        self._connection: Connection | None = None
        self._tasks: anyio.abc.TaskGroup | None = None

    # ------------------------------------------------------------ what a behaviour uses

    @property
    def tasks(self) -> anyio.abc.TaskGroup:
        """Task group that lives as long as the actor runs."""
        assert self._tasks is not None, "the actor does not run"
        return self._tasks

    @property
    def connection(self) -> Connection:
        """The actor's one connection."""
        assert self._connection is not None, "the actor is not connected"
        return self._connection

    @property
    def directory(self) -> Directory:
        """Who else is there."""
        return self._presence.directory

    def announcement(self) -> Announcement:
        """What this actor says of itself now."""
        return self._presence.announcement()

    def publish(self, subject: str, payload: bytes, reply: str | None = None) -> None:
        """Publishes a message of the data path, in parts when it is larger than the bus carries.

        The last part alone names the reply subject, so that nobody there comes back once.

        Raises:
            BusDown, BusCongested: not, or not wholly, sent; the receiver will notice.
        """
        connection = self.connection
        if len(payload) <= connection.max_payload_bytes:
            connection.publish(subject, payload, reply)
            return
        *first, last = split(payload, connection.max_payload_bytes)
        for piece in first:
            connection.publish(subject, piece)
        connection.publish(subject, last, reply)

    def try_publish(self, subject: str, payload: bytes, reply: str | None = None) -> bool:
        """Publishes where a loss is repaired by the owner's probing; False when the bus did not take it."""
        try:
            self.publish(subject, payload, reply)
        except BusError as error:
            self.log.warning("not_published", subject=subject[:200], reason=error.message)
            return False
        return True

    def doubt(self, instance: str) -> None:
        """Something addressed to that instance reached nobody: it is suspect until it is heard again."""
        self._presence.doubt(instance)

    async def subscribe(self, inboxes: Mapping[str, MessageHandler]) -> None:
        """Subscribes to subject patterns, each with the handler of its messages; in force when it returns.

        A behaviour needs it for what it must hear before it is ready; all else is in its `inboxes`.
        """
        for pattern, handler in inboxes.items():
            while True:
                try:
                    subscription = await self.connection.subscribe(pattern)
                    break
                except BusDown:
                    await self.clock.sleep(self.settings.timings.heartbeat_s)
            self._handlers[subscription.number] = handler

    def report_progress(self, text: str) -> None:
        """What this stage is doing while it starts; announced at once."""
        self._presence.progress = text
        self._presence.announce()

    def stop(self) -> None:
        """Asks the actor to drain and end."""
        self._stop.set()

    def hurry(self) -> None:
        """Cuts its drain short, one that has begun or the one to come."""
        hurried_s = anyio.current_time() + self.settings.timings.hurried_drain_s
        self._drain_until_s = min(self._drain_until_s, hurried_s)
        if self._drain_scope is not None:
            self._drain_scope.deadline = min(self._drain_scope.deadline, self._drain_until_s)

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Runs until `stop`, or until the behaviour fails.

        Raises:
            ExceptionGroup: holds what failed, `Superseded` for one when a live older instance of this kind and index
                was heard, `ConnectionClosed` when the bus gave the connection up.
        """
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._live)
                await self._stop.wait()
                if self.ready.is_set():
                    await self._drain()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            self._presence.progress = _reason(group)  # its last announcement tells why
            raise
        finally:
            if self._connection is not None:
                with anyio.CancelScope(shield=True):
                    self._presence.state = StageState.GONE
                    self._presence.announce()
                    await self._connection.close()

    async def _live(self) -> None:
        inbox = f"{self.subjects.inbox(self.instance)}.request"
        self._connection = await self._bus.connect(name=self.instance, inbox=inbox)
        await self.subscribe(
            {
                self.subjects.stage("*", "*"): self._presence.heard,
                self.subjects.discover(): lambda _: self._presence.announce(),
                self.subjects.control(self.instance, "*"): self._control_arrived,
            }
        )
        self.tasks.start_soon(self._receive_loop)
        self.tasks.start_soon(self._heartbeat_loop)
        self._presence.discover()
        await self._behaviour.start(self)
        await self.subscribe(self._behaviour.inboxes())
        self._presence.state, self._presence.progress = StageState.READY, ""
        self._presence.announce()
        self.ready.set()
        self.log.info("ready")

    async def _drain(self) -> None:
        self._presence.state = StageState.DRAINING
        self._presence.announce()
        self.log.info("draining")
        with anyio.move_on_after(self.settings.timings.drain_timeout_s) as scope:
            self._drain_scope = scope
            scope.deadline = min(scope.deadline, self._drain_until_s)
            await self._behaviour.drain()
        if scope.cancelled_caught:
            self.log.warning("drain_cut_short")

    # ------------------------------------------------------------ mailbox

    async def _receive_loop(self) -> None:
        """Takes messages until cancelled.

        Raises:
            ConnectionClosed: the bus gave the connection up. (`run` closes it only when this loop has ended.)
        """
        connection, handlers, behaviour = self.connection, self._handlers, self._behaviour
        while True:
            for item in await connection.receive():
                if isinstance(item, Message):
                    handler = handlers.get(item.subscription)
                    if handler is not None:
                        self._handle(handler, item)
                else:
                    self._bus_event(item)
            behaviour.received_all()

    def _handle(self, handler: MessageHandler, message: Message) -> None:
        """Lets one message be handled; its failure is its own, and the actor goes on.

        Raises:
            Superseded, EngineError: the actor cannot.
        """
        try:
            handler(message)
        except ENDS_THE_ACTOR:
            raise
        except MalformedMessage as error:
            self.log.warning("malformed_message", subject=message.subject, reason=error.message)
            send_answer(self, message.reply, error_answer(error))
        except Exception as error:  # the stage boundary: its sender gets an answer, the log the traceback
            self.log.exception("message_failed", subject=message.subject)
            told = error if isinstance(error, BusllmError) else internal_error(self.instance)
            send_answer(self, message.reply, error_answer(told))

    def _bus_event(self, event: BusEvent) -> None:
        match event:
            case Disconnected():
                self.log.warning("bus_lost", reason=event.reason)
            case Reconnected():
                self.log.warning("bus_back", outage_s=round(event.outage_s, 3))
                self._presence.resume()
            case Overflow():
                self.log.warning("mailbox_overflow", num_dropped=event.num_dropped)
            case PermissionRefused():
                self.log.error("bus_permission_refused", reason=event.reason)
            case _:
                assert_never(event)
        self._behaviour.bus_event(event)

    async def _heartbeat_loop(self) -> None:
        while True:
            self._presence.announce()
            await self.clock.sleep(self.settings.timings.heartbeat_s)
            if self.connection.is_connected:
                self._presence.judge()

    def _control_arrived(self, message: Message) -> None:
        self.tasks.start_soon(answer_control, self, self._behaviour, message)

    # ------------------------------------------------------------ what may be lost

    def _send_presence(self, subject: str, payload: bytes) -> None:
        """Heartbeats say nothing when the bus is away: `Disconnected` has said it."""
        if self._connection is not None and self._connection.is_connected:
            self.try_publish(subject, payload)

    def _publish_trace(self, event: TraceEvent) -> None:
        if self._connection is None or not self._connection.is_connected:
            return
        try:
            self._connection.publish(self.subjects.trace(event.uid, event.stage, event.event), encode_json(event))
        except (BusDown, BusCongested, PayloadTooLarge):
            self.log.debug("trace_event_dropped", uid=event.uid, event_name=event.event)


def _reason(group: BaseException) -> str:
    """The first error of a group, in words for people."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group.message if isinstance(group, BusllmError) else type(group).__name__
