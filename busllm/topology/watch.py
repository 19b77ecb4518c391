"""The ear of `busllm up` on the bus.

Owns: the connection of `up`: heartbeats in, and the word that an instance is gone out, said by the only one who surely
knows: its parent.
Does not know: what silence means (`supervise.py`).
Next on the path: `heartbeats.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import anyio
import msgspec

from busllm.bus.protocol import Bus, Connection, Disconnected, Message, Overflow, PermissionRefused, Reconnected
from busllm.bus.subjects import Subjects
from busllm.errors import BusCongested, BusDown, MalformedMessage
from busllm.ids import new_instance
from busllm.messages.codec import encode_json
from busllm.messages.control import Announcement, StageState, announcement_decoder
from busllm.telemetry.logging import get_logger
from busllm.topology.heartbeats import Heartbeats


class Watch:
    """Listens to the announcements of one cluster.

    Args:
        bus: where.
        subjects: of the cluster.
        heartbeats: what is fed.
    """

    def __init__(self, bus: Bus, subjects: Subjects, heartbeats: Heartbeats) -> None:
        self._bus = bus
        self._subjects = subjects
        self._heartbeats = heartbeats
        self._connection: Connection | None = None
        self._unsaid: dict[str, Announcement] = {}  # goodbyes that the bus did not take yet
        self._log = get_logger("busllm.up")

    async def run(self) -> None:
        """Connects, however long that takes, and listens until cancelled.

        Raises:
            BusPermissionDenied: the server refuses the credentials or the subscription.
        """
        instance = new_instance("up", 0)
        self._heartbeats.go_deaf()
        connection = await self._bus.connect(name=instance, inbox=self._subjects.inbox(instance))
        try:
            await connection.subscribe(self._subjects.stage("*", "*"))
            self._connection = connection
            self._heartbeats.listen_again()
            connection.publish(self._subjects.discover(), b"")
            while True:
                for item in await connection.receive():
                    self._handle(item)
        finally:
            self._connection = None
            with anyio.CancelScope(shield=True):
                await connection.close()

    def say_gone(self, announcements: Sequence[Announcement]) -> None:
        """Tells everyone that instances have ended; kept for later while the bus is away."""
        for announcement in announcements:
            gone = msgspec.structs.replace(announcement, state=StageState.GONE, progress="", load={}, statistics={})
            self._unsaid[gone.instance] = gone
        self._say()

    def _say(self) -> None:
        while self._unsaid and self._connection is not None:
            instance, gone = next(iter(self._unsaid.items()))
            try:
                self._connection.publish(self._subjects.stage(gone.kind, instance), encode_json(gone))
            except (BusDown, BusCongested) as error:
                self._log.warning("goodbye_postponed", gone=instance, reason=error.message)
                return
            del self._unsaid[instance]

    def _handle(self, item: Message | Disconnected | Reconnected | Overflow | PermissionRefused) -> None:
        match item:
            case Message():
                self._hear(item)
            case Reconnected():
                self._heartbeats.listen_again()
                self._say()
            case Overflow():
                self._heartbeats.listen_again()
            case Disconnected():
                self._heartbeats.go_deaf()
            case PermissionRefused():
                self._log.error("bus_refuses", reason=item.reason)
            case _:
                assert_never(item)

    def _hear(self, message: Message) -> None:
        try:
            announcement = announcement_decoder.decode(message.payload)
        except MalformedMessage as error:
            self._log.warning("malformed_announcement", subject=message.subject, reason=error.message)
            return
        self._heartbeats.hear(announcement)
