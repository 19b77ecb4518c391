"""The way out of a scheduler: each sequence's tokens to its detokenizer.

Owns: which detokenizer makes a sequence's text, the links to them, what waits for one, and which sequences the engine
must leave out of its steps meanwhile.
Does not know: the engine, owners.
Next on the path: `detokenizer_link.py` fills the batches, `stages/detokenizer/stage.py` takes them.
"""

from __future__ import annotations

from busllm.actors.actor import Actor
from busllm.bus.protocol import Message
from busllm.engine.sequence import SequenceTokens
from busllm.errors import Lost, MalformedMessage
from busllm.messages.codec import encode
from busllm.messages.to_detokenizer import StepTokens
from busllm.messages.to_frontend import failed
from busllm.requests.routing import pick
from busllm.stages.scheduler.detokenizer_link import DetokenizerLink
from busllm.stages.scheduler.held_sequence import HeldSequence
from busllm.stages.scheduler.held_table import HeldTable, Key

_NOBODY: frozenset[Key] = frozenset()


class Outbound:
    """Sends token batches."""

    def __init__(self, actor: Actor, table: HeldTable) -> None:
        self._actor = actor
        self._table = table
        self._links: dict[str, DetokenizerLink] = {}
        self._reply_prefix = f"{actor.subjects.inbox(actor.instance)}.batch"

    @property
    def acknowledgements(self) -> str:
        """Subject pattern on which detokenizers acknowledge batches."""
        return f"{self._reply_prefix}.*"

    def send(self, held: HeldSequence, tokens: SequenceTokens) -> None:
        """Adds tokens to the next batch; without any detokenizer they wait."""
        if held.lost_detokenizer:
            return  # its owner sends it on, and gets them then
        if held.backlog or (held.detokenizer is None and not self._open(held)):
            held.backlog.append(tokens)
            self._table.wait_changed(held)
            return
        assert held.detokenizer is not None
        self._links[held.detokenizer].add(held, tokens)

    def flush(self) -> None:
        """Sends what was added, one batch per detokenizer."""
        for link in self._links.values():
            self._send_batch(link, link.take_batch())

    def nudge(self) -> None:
        """Asks congested detokenizers for an acknowledgement: the last one, or what it was for, may be lost."""
        for link in self._links.values():
            if link.is_congested:
                self._send_batch(link, link.take_batch(nudge=True))

    def _send_batch(self, link: DetokenizerLink, batch: StepTokens | None) -> None:
        if batch is not None:
            actor, reply = self._actor, f"{self._reply_prefix}.{link.detokenizer}"
            actor.try_publish(actor.subjects.detokenize(link.detokenizer), encode(batch), reply)

    def acknowledged(self, message: Message) -> None:
        """A detokenizer acknowledges batches, or nobody listens there any more.

        Raises:
            MalformedMessage: the payload is no number.
        """
        detokenizer = message.subject.rpartition(".")[2]
        link = self._links.get(detokenizer)
        if link is None:
            return
        if message.no_responders:
            self._actor.doubt(detokenizer)
            self.lose(detokenizer, "nobody listens there")
        else:
            link.acknowledge(_batch_number(message.payload))

    def lose(self, detokenizer: str, reason: str) -> None:
        """A detokenizer is gone: the owners of its sequences are told, and send them on."""
        if self._links.pop(detokenizer, None) is None:
            return
        lost = [held for held in self._table.of_detokenizer(detokenizer) if not held.lost_detokenizer]
        for held in lost:
            held.lost_detokenizer = True
            self._table.wait_changed(held)
        error = Lost(f"The detokenizer {detokenizer} is lost: {reason}.")
        for generate in {held.generate.uid: held.generate for held in lost}.values():
            message = failed(generate.uid, generate.attempt, "detokenizer", error)
            self._actor.try_publish(self._actor.subjects.reply(generate.frontend, generate.uid), encode(message))

    def send_backlogs(self) -> list[HeldSequence]:
        """A detokenizer is there: sends what waited for one; returns the sequences that ended with it."""
        ended = []
        for held in list(self._table.waiting):
            backlog, held.backlog = held.backlog, []
            for tokens in backlog:
                self.send(held, tokens)
            self._table.wait_changed(held)
            if backlog and not held.must_wait and backlog[-1].finish_reason is not None:
                ended.append(held)
        return ended

    def held_back(self) -> frozenset[Key]:
        """Sequences whose further tokens would only pile up, or go where nobody was heard since the last bus gap."""
        blocked = {name for name, link in self._links.items() if link.is_congested or not self._is_heard(name)}
        if not blocked and not self._table.waiting:
            return _NOBODY
        return frozenset(held.key for held in self._table.waiting).union(
            held.key for detokenizer in blocked for held in self._table.of_detokenizer(detokenizer)
        )

    def _is_heard(self, detokenizer: str) -> bool:
        peer = self._actor.directory.get(detokenizer)
        return peer is None or peer.heard_since_gap

    def _open(self, held: HeldSequence) -> bool:
        able = self._actor.directory.usable("detokenizer", held.generate.avoid)
        peer = pick(able, self._table.num_by_detokenizer() if len(able) > 1 else {})
        if peer is None:
            return False
        link = self._links.get(peer.instance)
        if link is None:
            link = self._links[peer.instance] = DetokenizerLink(self._actor.instance, peer.instance)
        self._table.assign(held, peer.instance)
        link.open(held)
        return True


def _batch_number(payload: bytes) -> int:
    try:
        return int(payload)
    except ValueError as error:
        raise MalformedMessage("An acknowledgement's payload is the number of a batch.") from error
