"""The way out of a scheduler: each sequence's tokens to its detokenizer.

Owns: which detokenizer makes a sequence's text, the links to them, what waits for one, and which sequences the engine
must leave out of its steps meanwhile.
Does not know: the engine, owners.
Next on the path: `detokenizer_link.py` fills the batches, `stages/detokenizer/stage.py` takes them.
"""

from __future__ import annotations

from collections import Counter

from busllm.actors.actor import Actor
from busllm.bus.protocol import Message
from busllm.engine.sequence import SequenceTokens
from busllm.errors import MalformedMessage
from busllm.messages.codec import encode
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
        self._some_wait = False
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
            self._some_wait = True
            return
        assert held.detokenizer is not None
        self._links[held.detokenizer].add(held, tokens)

    def flush(self) -> None:
        """Sends what was added, one batch per detokenizer."""
        actor = self._actor
        for link in self._links.values():
            batch = link.take_batch()
            if batch is not None:
                reply = f"{self._reply_prefix}.{link.detokenizer}"
                actor.try_publish(actor.subjects.detokenize(link.detokenizer), encode(batch), reply)

    def acknowledged(self, message: Message) -> None:
        """A detokenizer acknowledges batches, or nobody listens there any more.

        Raises:
            MalformedMessage: the payload is no number.
        """
        link = self._links.get(message.subject.rpartition(".")[2])
        if link is None:
            return
        if message.no_responders:
            self._actor.directory.doubt(link.detokenizer)
            self.lose(link.detokenizer)
        else:
            link.acknowledge(_batch_number(message.payload))

    def lose(self, detokenizer: str) -> None:
        """A detokenizer is gone: its sequences wait until their owners send them on."""
        if self._links.pop(detokenizer, None) is not None:
            for held in self._table:
                if held.detokenizer == detokenizer:
                    held.lost_detokenizer = self._some_wait = True

    def send_backlogs(self) -> list[HeldSequence]:
        """A detokenizer is there: sends what waited for one; returns the sequences that ended with it."""
        ended = []
        for held in self._table:
            backlog, held.backlog = held.backlog, []
            for tokens in backlog:
                self.send(held, tokens)
            if backlog and not held.must_wait and backlog[-1].finish_reason is not None:
                ended.append(held)
        return ended

    def acknowledgements_may_be_lost(self) -> None:
        """After a bus gap or an overflow nobody waits for what may never come; holes show in the indexes."""
        for link in self._links.values():
            link.assume_all_acknowledged()

    def links_are_heard(self) -> bool:
        """Whether every detokenizer in use was heard since the bus came back."""
        peers = [self._actor.directory.get(detokenizer) for detokenizer in self._links]
        return all(peer.heard_since_gap for peer in peers if peer is not None)

    def held_back(self) -> frozenset[Key]:
        """Sequences whose further tokens would only pile up."""
        congested = {detokenizer for detokenizer, link in self._links.items() if link.is_congested}
        if not congested and not self._some_wait:
            return _NOBODY
        waiting = [held.key for held in self._table if held.must_wait]
        self._some_wait = bool(waiting)
        return frozenset(waiting).union(held.key for held in self._table if held.detokenizer in congested)

    def _open(self, held: HeldSequence) -> bool:
        able = self._actor.directory.usable("detokenizer", held.generate.avoid)
        peer = pick(able, self._sequences_per_link() if len(able) > 1 else {})
        if peer is None:
            return False
        link = self._links.get(peer.instance)
        if link is None:
            link = self._links[peer.instance] = DetokenizerLink(self._actor.instance, peer.instance)
        link.open(held)
        return True

    def _sequences_per_link(self) -> Counter[str]:
        return Counter(held.detokenizer for held in self._table if held.detokenizer is not None)


def _batch_number(payload: bytes) -> int:
    try:
        return int(payload)
    except ValueError as error:
        raise MalformedMessage("An acknowledgement's payload is the number of a batch.") from error
