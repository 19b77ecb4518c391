"""Requests that nobody waits for any more: found by asking their owners.

Owns: the question "which of these requests do you still wait for?" and when it is asked: every now and then, and at
once after anything by which an abort may have been missed (a bus gap of this stage or of the owner, an overflow).
Does not know: what a stage holds for a request (it is given a snapshot and a way to drop).

State belongs to the owner of a uid. An abort travels at most once, so what it should have ended is looked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import anyio

from busllm.actors.actor import Actor
from busllm.actors.directory import PeerChange, PeerNews
from busllm.errors import BusError, MalformedMessage, RemoteError
from busllm.messages.codec import encode_json
from busllm.messages.control import Probe, live_answer_decoder, raise_if_error

HeldByOwner = Mapping[str, Mapping[str, int]]  # owner → uid → highest attempt held
OWNER_KINDS = ("frontend", "client")
MAX_ASKED = 500  # uids in one question, so that neither side is busy for long with one


class OrphanWatch:
    """Drops what a stage holds for nobody.

    Args:
        actor: of the stage.
        held: a snapshot of what the stage holds.
        drop: ends attempts of a uid up to a number; None = all.
    """

    def __init__(self, actor: Actor, held: Callable[[], HeldByOwner], drop: Callable[[str, int | None], None]) -> None:
        self._actor = actor
        self._held = held
        self._drop = drop
        self._poked = anyio.Event()

    def poke(self) -> None:
        """An abort may have been missed: ask now."""
        self._poked.set()

    def peer_changed(self, change: PeerChange) -> None:
        """An owner that was silent may have aborted meanwhile; one that is gone waits for nothing."""
        if change.peer.kind not in OWNER_KINDS:
            return
        if change.news is PeerNews.RECOVERED:
            self.poke()
        elif change.news is PeerNews.GONE:
            for uid in self._held().get(change.peer.instance, {}):
                self._drop(uid, None)

    async def run(self) -> None:
        """Asks until cancelled."""
        period_s = self._actor.settings.timings.orphan_check_s
        while True:
            with anyio.move_on_after(period_s):
                await self._poked.wait()
            self._poked = anyio.Event()
            if self._actor.connection.is_connected:
                for owner, held in self._held().items():
                    await self._ask_about_all(owner, held)

    async def _ask_about_all(self, owner: str, held: Mapping[str, int]) -> None:
        """`held` was taken before the questions: what comes meanwhile is not judged by the answers."""
        uids = iter(held)
        while some := tuple(itertools.islice(uids, MAX_ASKED)):
            live = await self._ask(owner, some)
            if live is None:
                return  # when it stays silent the directory calls it gone
            for uid in some:
                if uid not in live:
                    self._drop(uid, None)
                elif held[uid] < live[uid]:
                    self._drop(uid, held[uid])

    async def _ask(self, owner: str, uids: tuple[str, ...]) -> dict[str, int] | None:
        """Those of the requests that the owner still waits for, with their attempts; None = it does not say."""
        actor = self._actor
        subject, question = actor.subjects.control(owner, "live"), encode_json(Probe(uids))
        timeout_s = actor.settings.timings.probe_timeout_s
        try:
            payload = await actor.connection.request(subject, question, timeout_s=timeout_s)
            raise_if_error(payload)
            return dict(live_answer_decoder.decode(payload).live)
        except (BusError, RemoteError, MalformedMessage) as error:
            actor.log.debug("owner_not_asked", owner=owner, reason=error.message)
            return None
