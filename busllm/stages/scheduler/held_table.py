"""The sequences that a scheduler holds, and the ones that it held until lately.

Owns: the table by (uid, choice), by uid and by detokenizer; who must wait; what a probe is told.
Does not know: the engine, the bus.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping

from busllm.messages.control import ProbedSequence
from busllm.stages.scheduler.held_sequence import HeldSequence

MAX_FINISHED = 10_000

Key = tuple[str, int]  # uid, choice


class HeldTable:
    """Held sequences; at most one attempt of each.

    Most of many held sequences wait in the engine's queue and have no token yet. The indexes by detokenizer and of
    those that must wait hold only the ones that have, so what is asked for at every step costs nothing for the others.
    """

    def __init__(self) -> None:
        self._held: dict[Key, HeldSequence] = {}
        self._of_uid: dict[str, set[int]] = defaultdict(set)
        self._of_detokenizer: dict[str, dict[Key, HeldSequence]] = {}
        self._waiting: dict[Key, HeldSequence] = {}
        self._finished: OrderedDict[str, dict[int, ProbedSequence]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldSequence]:
        return iter(list(self._held.values()))

    def get(self, uid: str, choice: int, attempt: int | None = None) -> HeldSequence | None:
        """The sequence, if it is held (at that attempt)."""
        held = self._held.get((uid, choice))
        return held if held is not None and attempt in (None, held.generate.attempt) else None

    def of_uid(self, uid: str) -> list[HeldSequence]:
        """All choices of a request."""
        return [self._held[uid, choice] for choice in self._of_uid.get(uid, ())]

    def by_owner(self) -> dict[str, dict[str, int]]:
        """Uids and attempts of the held requests, by owner."""
        owners: dict[str, dict[str, int]] = {}
        for held in self:
            owners.setdefault(held.generate.frontend, {})[held.generate.uid] = held.generate.attempt
        return owners

    def assign(self, held: HeldSequence, detokenizer: str) -> None:
        """A detokenizer makes the text of a sequence from now on."""
        held.detokenizer = detokenizer
        self._of_detokenizer.setdefault(detokenizer, {})[held.key] = held

    def of_detokenizer(self, detokenizer: str) -> Collection[HeldSequence]:
        """Sequences whose text it makes."""
        return self._of_detokenizer.get(detokenizer, {}).values()

    def num_by_detokenizer(self) -> Mapping[str, int]:
        """How many these are, of each detokenizer that has any."""
        return {detokenizer: len(sequences) for detokenizer, sequences in self._of_detokenizer.items()}

    def wait_changed(self, held: HeldSequence) -> None:
        """Whether a sequence must wait may have changed."""
        if held.must_wait:
            self._waiting[held.key] = held
        else:
            self._waiting.pop(held.key, None)

    @property
    def waiting(self) -> Collection[HeldSequence]:
        """Sequences that must wait: for a detokenizer, or for their owner to send them on."""
        return self._waiting.values()

    def add(self, held: HeldSequence) -> bool:
        """Takes a sequence in place of an earlier attempt; False when this attempt or a later one is held."""
        known = self._held.get(held.key)
        if known is not None and known.generate.attempt >= held.generate.attempt:
            return False
        if known is not None:
            self._take_off_indexes(known)
        self._held[held.key] = held
        self._of_uid[held.generate.uid].add(held.start.choice)
        return True

    def remove(self, held: HeldSequence, *, finished: bool) -> None:
        """Lets go of a sequence; a finished one is remembered for probes."""
        uid, choice = held.key
        del self._held[held.key]
        self._take_off_indexes(held)
        self._of_uid[uid].discard(choice)
        if not self._of_uid[uid]:
            del self._of_uid[uid]
        if finished:
            ended = self._finished.setdefault(uid, {})
            ended[choice] = ProbedSequence(choice, held.generate.attempt, "finished", held.next_index)
            if len(self._finished) > MAX_FINISHED:
                self._finished.popitem(last=False)

    def _take_off_indexes(self, held: HeldSequence) -> None:
        self._waiting.pop(held.key, None)
        if held.detokenizer is not None:
            sequences = self._of_detokenizer[held.detokenizer]
            del sequences[held.key]
            if not sequences:
                del self._of_detokenizer[held.detokenizer]

    def probed(self, uid: str) -> tuple[ProbedSequence, ...]:
        """What is known of a request; empty when nothing is."""
        known = dict(self._finished.get(uid, {}))
        for held in self.of_uid(uid):
            choice, state = held.start.choice, held.state
            known[choice] = ProbedSequence(choice, held.generate.attempt, state, held.next_index)
        return tuple(known.values())
