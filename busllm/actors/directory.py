"""Who is there: every announced instance as this actor has heard it itself.

Owns: the table of peers and the judgement alive, suspect, gone.
Does not know: the bus (it is told what was heard and when), what a stage does.

A peer is usable for new work when it was heard since this actor's own last bus gap, is ready, alive, and speaks the
same protocol about the same model.
"""

from __future__ import annotations

import enum

import msgspec

from busllm.actors.clock import Timings
from busllm.messages.control import Announcement, StageState, Versions


class PeerHealth(enum.Enum):
    """What silence says about a peer."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    GONE = "gone"


class Peer:
    """One instance as it was last heard."""

    __slots__ = ("announcement", "health", "heard_at", "heard_since_gap")

    def __init__(self, announcement: Announcement, heard_at: float) -> None:
        self.announcement = announcement
        self.heard_at = heard_at
        self.heard_since_gap = True
        self.health = PeerHealth.ALIVE

    @property
    def instance(self) -> str:
        """Its instance name."""
        return self.announcement.instance

    @property
    def kind(self) -> str:
        """Its stage kind."""
        return self.announcement.kind

    @property
    def load(self) -> float:
        """What it announced last as `requests`."""
        return self.announcement.load.get("requests", 0.0)


class PeerNews(enum.Enum):
    """What happened to a peer."""

    READY = "ready"
    UPDATED = "updated"
    DRAINING = "draining"
    SUSPECT = "suspect"
    RECOVERED = "recovered"
    GONE = "gone"


class PeerChange(msgspec.Struct, frozen=True):
    """News of one peer."""

    news: PeerNews
    peer: Peer


class Directory:
    """The peers of one actor.

    Who is usable is asked for every request and changes seldom, so the answer is kept until a peer's usability changes.
    """

    def __init__(self, versions: Versions, timings: Timings) -> None:
        self._versions = versions
        self._timings = timings
        self._peers: dict[str, Peer] = {}
        self._usable: dict[str, list[Peer]] = {}  # by kind; what is not there has to be looked up

    def hear(self, announcement: Announcement, now: float) -> list[PeerChange]:
        """Takes one announcement; `now` is the clock's monotonic time."""
        peer = self._peers.get(announcement.instance)
        if announcement.state is StageState.GONE:
            return [] if peer is None else [self._bury(peer)]
        if peer is None:
            peer = self._peers[announcement.instance] = Peer(announcement, now)
            was_ready, was_draining, recovered, usable_as = False, False, False, None
        else:
            usable_as = self._usable_as(peer)
            was_ready = peer.announcement.state is StageState.READY
            was_draining = peer.announcement.state is StageState.DRAINING
            recovered = peer.health is PeerHealth.SUSPECT or not peer.heard_since_gap
            peer.announcement, peer.heard_at = announcement, now
            peer.health, peer.heard_since_gap = PeerHealth.ALIVE, True
        if self._usable_as(peer) != usable_as:
            self._usable.clear()
        changes = [PeerChange(PeerNews.RECOVERED, peer)] if recovered else []
        if announcement.state is StageState.READY and not was_ready:
            changes.append(PeerChange(PeerNews.READY, peer))
        elif announcement.state is StageState.DRAINING and not was_draining:
            changes.append(PeerChange(PeerNews.DRAINING, peer))
        elif not changes:
            changes.append(PeerChange(PeerNews.UPDATED, peer))
        return changes

    def doubt(self, instance: str) -> list[PeerChange]:
        """Something addressed to it reached nobody: suspect until it is heard again."""
        peer = self._peers.get(instance)
        if peer is None or peer.health is not PeerHealth.ALIVE:
            return []
        return [self._suspect(peer)]

    def tick(self, now: float) -> list[PeerChange]:
        """Judges by silence."""
        changes = []
        for peer in list(self._peers.values()):
            silent_s = now - peer.heard_at
            if silent_s >= self._timings.gone_s:
                changes.append(self._bury(peer))
            elif silent_s >= self._timings.suspect_s and peer.health is PeerHealth.ALIVE:
                changes.append(self._suspect(peer))
        return changes

    def resume(self, now: float) -> None:
        """After this actor's own bus gap: nobody is blamed for it, and nobody is addressed before it is heard."""
        for peer in self._peers.values():
            peer.heard_at = max(peer.heard_at, now)
            peer.heard_since_gap = False
        self._usable.clear()

    def _suspect(self, peer: Peer) -> PeerChange:
        self._usable.clear()
        peer.health = PeerHealth.SUSPECT
        return PeerChange(PeerNews.SUSPECT, peer)

    def _bury(self, peer: Peer) -> PeerChange:
        self._usable.clear()
        del self._peers[peer.instance]
        peer.health = PeerHealth.GONE
        return PeerChange(PeerNews.GONE, peer)

    def get(self, instance: str) -> Peer | None:
        """The peer of that name, if it is not gone."""
        return self._peers.get(instance)

    def peers(self) -> list[Peer]:
        """Everybody who is not gone."""
        return list(self._peers.values())

    def is_compatible(self, announcement: Announcement) -> bool:
        """Whether its protocol and model agree with this actor's."""
        theirs, ours = announcement.versions, self._versions
        same_model = not theirs.model or not ours.model or theirs.model == ours.model
        return theirs.protocol == ours.protocol and same_model

    def is_usable(self, peer: Peer) -> bool:
        """Whether new work may go there."""
        return (
            peer.health is PeerHealth.ALIVE
            and peer.heard_since_gap
            and peer.announcement.state is StageState.READY
            and self.is_compatible(peer.announcement)
        )

    def _usable_as(self, peer: Peer) -> str | None:
        return peer.kind if self.is_usable(peer) else None

    def usable(self, kind: str, avoid: tuple[str, ...] = ()) -> list[Peer]:
        """Peers of a kind for new work; those in `avoid` only when there is no other."""
        able = self._usable.get(kind)
        if able is None:
            able = [peer for peer in self._peers.values() if peer.kind == kind and self.is_usable(peer)]
            self._usable[kind] = able
        wanted = [peer for peer in able if peer.instance not in avoid] if avoid else None
        return wanted or list(able)

    def why_unusable(self, kind: str) -> str | None:
        """Why no instance of a kind can be used, for people; None when one can."""
        peers = [peer for peer in self._peers.values() if peer.kind == kind]
        if any(self.is_usable(peer) for peer in peers):
            return None
        for peer in peers:
            announcement = peer.announcement
            if not self.is_compatible(announcement):
                return f"{peer.instance} speaks protocol {announcement.versions.protocol} or serves another model"
            if peer.health is not PeerHealth.ALIVE or not peer.heard_since_gap:
                return f"{peer.instance} is silent"
            progress = f" ({announcement.progress})" if announcement.progress else ""
            return f"{peer.instance} is {announcement.state.value}{progress}"
        return "no instance is running"
