"""Handing a request to a stage: the first time, and on to another when its holder is lost.

Owns: the messages `Tokenize`, `Generate` and the abort of earlier attempts that an owner publishes; the count of
requests that this owner has at each instance.
Does not know: when a request has to be sent on (`watch.py`, `owner.py`).

Sending on repeats the record that the owner keeps: prompt ids, output ids so far, characters delivered, the seed. New
work is published before the abort of the old, so a scheduler that still runs the sequence adopts it.
"""

from __future__ import annotations

from collections import Counter

from busllm.actors.actor import Actor
from busllm.errors import BusCongested, BusDown, Lost
from busllm.messages.codec import encode, pack_ids
from busllm.messages.to_everyone import encode_abort
from busllm.messages.to_scheduler import ChoiceStart, Generate
from busllm.messages.to_tokenizer import Tokenize
from busllm.requests.agenda import Agenda
from busllm.requests.live import LiveRequest, Phase, WaitsFor
from busllm.requests.routing import pick

MAX_AVOIDED = 8
MAX_TRIES_AT_ONCE = 3  # later ones, as long as no new token comes, are made after a pause
MAX_DOUBLINGS = 4


class Sender:
    """Publishes the requests of one owner; whoever's state it changes is looked at in the next tick."""

    def __init__(self, actor: Actor, agenda: Agenda) -> None:
        self._actor = actor
        self._agenda = agenda
        self._in_flight: Counter[str] = Counter()

    def begin(self, live: LiveRequest) -> None:
        """Sends a new request for the first time."""
        live.attempt = 1
        self.dispatch(live)

    def send_on(self, live: LiveRequest, reason: str, *, avoid: str | None, holder_died: bool) -> None:
        """Starts the next attempt.

        Args:
            reason: for the log and the trace.
            avoid: instance that should not get it again while there is another.
            holder_died: `avoid` has ended or vanished, which counts towards the limit that ends a request which kills
                whoever holds it. One that is heard again was only slow: it counts no more.
        """
        timings = self._actor.settings.timings
        if holder_died and avoid is not None:
            directory = self._actor.directory
            live.holders_lost = {name for name in live.holders_lost if directory.get(name) is None} | {avoid}
            if len(live.holders_lost) > timings.max_holders_lost:
                live.fail(Lost(f"{len(live.holders_lost)} stages in a row died while they held this request."))
                self.abort(live)
                return
        previous, now = live.attempt, self._actor.clock.monotonic()
        live.attempt += 1
        live.fruitless += 1
        if avoid is not None:
            live.avoid = (*(name for name in live.avoid if name != avoid), avoid)[-MAX_AVOIDED:]
        if live.trouble_since is None:
            live.trouble_since = now
        self._actor.trace.record(live.uid, "sent_on", attempt=live.attempt, reason=reason)
        self._actor.log.info("sent_on", uid=live.uid, attempt=live.attempt, reason=reason)
        if live.fruitless > MAX_TRIES_AT_ONCE:
            doublings = min(live.fruitless - MAX_TRIES_AT_ONCE, MAX_DOUBLINGS)
            live.not_before = now + timings.retry_pause_s * 2**doublings
            self.let_wait(live, WaitsFor.PAUSE)
        else:
            self.dispatch(live)
        self._publish_abort(live.uid, previous)

    def dispatch(self, live: LiveRequest) -> None:
        """Sends the current attempt to whoever can take it; leaves `live.waits_for` set when nobody can."""
        now = self._actor.clock.monotonic()
        live.taken = False
        live.detokenizer = None
        live.sent_at = live.heard_at = now
        for choice in live.unfinished():
            choice.sent(now)
        try:
            missing = self._to_tokenizer(live) if live.prompt_ids is None else self._to_scheduler(live)
        except (BusDown, BusCongested):
            missing = WaitsFor.BUS
        self.let_wait(live, missing)

    def let_wait(self, live: LiveRequest, missing: WaitsFor | None) -> None:
        """The request is with nobody until something comes; None = it is with somebody."""
        now = self._actor.clock.monotonic()
        live.waits_for = missing
        if missing is not None and live.trouble_since is None:
            live.trouble_since = now
        self._agenda.note(live.uid, now)

    def abort(self, live: LiveRequest) -> None:
        """Ends every attempt of a request, wherever it is."""
        self._publish_abort(live.uid, None)

    def forget(self, live: LiveRequest) -> None:
        """The request has ended: its holders have one less, and nobody looks at it any more."""
        self._agenda.forget(live.uid)
        self.hold(live, tokenizer=None, scheduler=None)

    def hold(self, live: LiveRequest, *, tokenizer: str | None, scheduler: str | None) -> None:
        """Notes who holds a request."""
        for old, new in ((live.tokenizer, tokenizer), (live.scheduler, scheduler)):
            if old != new:
                if old is not None:
                    self._in_flight[old] -= 1
                    if not self._in_flight[old]:
                        del self._in_flight[old]
                if new is not None:
                    self._in_flight[new] += 1
        live.tokenizer, live.scheduler = tokenizer, scheduler

    def _publish_abort(self, uid: str, attempt: int | None) -> None:
        self._actor.try_publish(self._actor.subjects.abort(uid), encode_abort(attempt))

    def _to_tokenizer(self, live: LiveRequest) -> WaitsFor | None:
        actor, request = self._actor, live.request
        live.phase = Phase.TOKENIZING
        peer = pick(actor.directory.usable("tokenizer", live.avoid), self._in_flight)
        self.hold(live, tokenizer=peer.instance if peer else None, scheduler=None)
        if peer is None:
            return WaitsFor.TOKENIZER
        message = Tokenize(
            uid=live.uid,
            attempt=live.attempt,
            frontend=actor.instance,
            prompts=request.prompts,
            params=request.params,
            seed=live.seed,
            n=request.n,
            priority=request.priority,
            cache_namespace=request.cache_namespace,
            avoid=live.avoid,
        )
        subjects = actor.subjects
        reply = subjects.reply(actor.instance, live.uid)
        actor.publish(subjects.tokenize(peer.instance, live.uid), encode(message), reply)
        return None

    def _to_scheduler(self, live: LiveRequest) -> WaitsFor | None:
        actor = self._actor
        live.phase = Phase.SCHEDULED
        able = actor.directory.usable("scheduler", live.avoid)
        same = next((peer for peer in able if peer.instance == live.scheduler), None)
        peer = same or pick(able, self._in_flight)
        self.hold(live, tokenizer=None, scheduler=peer.instance if peer else None)
        if peer is None:
            return WaitsFor.SCHEDULER
        subject = actor.subjects.generate(peer.instance, live.uid)
        reply = actor.subjects.reply(actor.instance, live.uid)
        for number in range(len(live.request.prompts)):
            message = self._generate(live, number)
            if message.choices:
                actor.publish(subject, encode(message), reply)
        return None

    def _generate(self, live: LiveRequest, prompt_number: int) -> Generate:
        request = live.request
        assert live.prompt_ids is not None
        of_prompt = live.choices[prompt_number * request.n : (prompt_number + 1) * request.n]
        return Generate(
            uid=live.uid,
            attempt=live.attempt,
            frontend=self._actor.instance,
            prompt_ids=live.prompt_ids[prompt_number],
            choices=tuple(
                ChoiceStart(choice.number, pack_ids(choice.output_ids), choice.delivered_chars)
                for choice in of_prompt
                if not choice.finished
            ),
            params=request.params,
            seed=live.seed,
            priority=request.priority,
            cache_namespace=request.cache_namespace,
            avoid=live.avoid,
        )
