"""How an actor shows itself to others and hears them.

Owns: announcements, heartbeats, the directory, the check that no older instance lives in the same place.
Does not know: what the actor does, how bytes travel (it is given a function that sends).
"""

from __future__ import annotations

import os
from collections.abc import Callable

from busllm.actors.behaviour import Behaviour
from busllm.actors.clock import Clock
from busllm.actors.directory import Directory, PeerChange
from busllm.actors.settings import ActorSettings
from busllm.bus.protocol import Message
from busllm.bus.subjects import Subjects
from busllm.errors import MalformedMessage, Superseded
from busllm.ids import is_token
from busllm.messages.codec import encode_json
from busllm.messages.control import Announcement, StageState, announcement_decoder

Send = Callable[[str, bytes], object]


class Place:
    """Where an actor stands: kind and index, which only one live instance may hold, and the instance name."""

    def __init__(self, kind: str, index: int, instance: str) -> None:
        self.kind = kind
        self.index = index
        self.instance = instance


class Presence:
    """One actor's presence on the bus."""

    def __init__(self, place: Place, behaviour: Behaviour, settings: ActorSettings, clock: Clock, send: Send) -> None:
        self.directory = Directory(settings.versions, settings.timings)
        self.state = StageState.STARTING
        self.progress = ""
        self._place = place
        self._behaviour = behaviour
        self._settings = settings
        self._clock = clock
        self._send = send
        self._subjects = Subjects(settings.cluster)
        self._started_at = clock.time()
        self._older: frozenset[str] = frozenset()

    def announcement(self) -> Announcement:
        """What this actor says of itself now."""
        return Announcement(
            kind=self._place.kind,
            index=self._place.index,
            instance=self._place.instance,
            host=self._settings.host,
            pid=os.getpid(),
            state=self.state,
            progress=self.progress,
            started_at=self._started_at,
            versions=self._settings.versions,
            load=self._behaviour.load(),
            statistics=self._behaviour.statistics(),
        )

    def announce(self) -> None:
        """Says so on the bus."""
        self._send(self._subjects.stage(self._place.kind, self._place.instance), encode_json(self.announcement()))

    def discover(self) -> None:
        """Asks everybody to announce themselves, and does so itself."""
        self._send(self._subjects.discover(), b"")
        self.announce()

    def heard(self, message: Message) -> None:
        """Takes an announcement.

        Raises:
            Superseded: a live older instance of this kind and index is there.
            MalformedMessage: it is none.
        """
        other = announcement_decoder.decode(message.payload)
        if not is_token(other.instance):
            raise MalformedMessage("An announcement's instance cannot be a token of a subject.")
        if other.instance == self._place.instance:
            return
        self._check_superseded(other)
        self._tell(self.directory.hear(other, self._clock.monotonic()))

    def judge(self) -> None:
        """Looks who has been silent for too long."""
        self._tell(self.directory.tick(self._clock.monotonic()))

    def doubt(self, instance: str) -> None:
        """Something addressed to that instance reached nobody."""
        self._tell(self.directory.doubt(instance))

    def resume(self) -> None:
        """The bus is back: nobody is blamed for the gap, everybody is asked."""
        self.directory.resume(self._clock.monotonic())
        self.discover()

    def _tell(self, changes: list[PeerChange]) -> None:
        for change in changes:
            self._behaviour.peer_changed(change)

    def _check_superseded(self, other: Announcement) -> None:
        same_place = (other.kind, other.index) == (self._place.kind, self._place.index)
        if not (self._behaviour.is_unique and same_place) or other.state is StageState.GONE:
            return
        if (other.started_at, other.instance) >= (self._started_at, self._place.instance):
            return
        # One announcement may be the last of an instance that is ending, or a forgery; one that lives says it again.
        lives, self._older = other.instance in self._older, self._older | {other.instance}
        if lives:
            where = f"host {other.host}, pid {other.pid}"
            raise Superseded(f"{other.instance} ({where}) is alive and older; this one ends.")
