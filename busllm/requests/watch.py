"""Watching the requests of an owner: deadlines, missing `Taken`s, silence and what is asked about it.

Owns: the periodic look at the requests that are due, and the judgement of a probe's answer.
Does not know: how a request is sent on (`sending.py`), what replies bring (`owner.py`).

A choice silent for `silence_s` is asked about at its holder, many uids in one message. It is well when the tokenizer
or scheduler has this attempt and has not produced more than has arrived here: what it has produced would have come
within the silence. A doubtful answer is checked once more after `strike_s`, then the request is sent on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio

from busllm.actors.actor import Actor
from busllm.errors import (
    BusError,
    BusllmError,
    BusUnavailable,
    MalformedMessage,
    NoResponders,
    RemoteError,
    ResumeDeadlineExceeded,
    StageMissing,
)
from busllm.messages.codec import encode_json
from busllm.messages.control import Probe, ProbeAnswer, ProbedSequence, probe_answer_decoder, raise_if_error
from busllm.requests.agenda import Agenda
from busllm.requests.live import Choice, LiveRequest, Phase, WaitsFor
from busllm.requests.sending import Sender

STRIKES = 2
MAX_PROBED = 500  # uids in one message
MAX_LOOKS = 2000  # requests looked at in one tick; the others that are due come in the next one


class Watch:
    """Looks after the live requests of one owner.

    A request is looked at when something may have become wrong with it: in the tick after its state has changed, in
    every tick while it is in trouble, else at the end of the silence that it may keep. So a tick costs as much as there
    is to do, not as much as there are requests.

    Args:
        actor, sender: of the owner.
        agenda: when each request is due; the sender notes changes there.
        lives: the owner's open requests.
        ended: called with each request that a look may have ended.
    """

    def __init__(
        self,
        actor: Actor,
        sender: Sender,
        agenda: Agenda,
        lives: Mapping[str, LiveRequest],
        ended: Callable[[LiveRequest], None],
    ) -> None:
        self._actor = actor
        self._timings = actor.settings.timings
        self._sender = sender
        self._agenda = agenda
        self._lives = lives
        self._ended = ended
        self._judges_after = 0.0
        self._down_since: float | None = None
        self._judging = self._text_is_made = True
        self._probing = False

    def bus_is_back(self, now: float) -> None:
        """After a gap nobody is judged for a while; then every request is asked about."""
        self._judges_after = now + self._timings.settle_s
        self.ask_about_all()

    def ask_about_all(self) -> None:
        """Messages may have been lost: treat every request as silent."""
        for live in self._lives.values():
            for choice in live.unfinished():
                choice.heard_at = None
        self._agenda.note_all(self._actor.clock.monotonic())

    def tick(self) -> None:
        """Looks at the requests that are due."""
        actor, now = self._actor, self._actor.clock.monotonic()
        connected = actor.connection.is_connected
        if connected:
            self._down_since = None
        elif self._down_since is None:
            self._down_since = now
        judging = connected and now >= self._judges_after
        text_is_made = bool(actor.directory.usable("detokenizer"))
        if (judging, text_is_made) != (self._judging, self._text_is_made):
            self._judging, self._text_is_made = judging, text_is_made
            self._agenda.note_all(now)
        silent: dict[str, list[str]] = {}
        for uid in self._agenda.take(now, MAX_LOOKS):
            live = self._lives.get(uid)
            if live is None:
                continue
            due = self._next_look(live, now)
            if due <= now:  # else it has spoken meanwhile, as nearly all have
                self._look_at(live, now, silent)
                self._ended(live)
                due = self._next_look(live, now)
            if not live.is_done:
                self._agenda.note(uid, due)
        if silent and not self._probing:
            self._probing = True
            actor.tasks.start_soon(self._probe, silent)

    def _expired(self, live: LiveRequest, now: float) -> bool:
        since = self._down_since if self._down_since is not None else live.trouble_since
        if since is None:
            return False
        never_served = not any(choice.output_ids for choice in live.choices) and (
            live.waits_for in (WaitsFor.TOKENIZER, WaitsFor.SCHEDULER) or not self._has_detokenizer(live)
        )
        limit_s = (
            self._timings.first_stage_s
            if never_served and self._down_since is None
            else self._timings.resume_deadline_s
        )
        if now - since < limit_s:
            return False
        live.fail(self._give_up_reason(live, limit_s))
        self._sender.abort(live)
        return True

    def _has_detokenizer(self, live: LiveRequest) -> bool:
        """Whether somebody makes its text, or could."""
        directory = self._actor.directory
        own = live.detokenizer is not None and directory.get(live.detokenizer) is not None
        return own or bool(directory.usable("detokenizer"))

    def _give_up_reason(self, live: LiveRequest, limit_s: float) -> BusllmError:
        if self._down_since is not None or live.waits_for is WaitsFor.BUS:
            return BusUnavailable(f"The bus is away and did not come back within {limit_s:g} s.")
        if limit_s == self._timings.resume_deadline_s and live.was_scheduled:
            return ResumeDeadlineExceeded(f"A stage was lost and nobody could take over within {limit_s:g} s.")
        if not self._has_detokenizer(live):
            kind = "detokenizer"
        else:
            kind = "tokenizer" if live.prompt_ids is None else "scheduler"
        return StageMissing(kind, self._actor.directory.why_unusable(kind) or f"nobody took it within {limit_s:g} s")

    def _look_at(self, live: LiveRequest, now: float, silent: dict[str, list[str]]) -> None:
        if self._judging and not self._text_is_made and live.trouble_since is None and not self._has_detokenizer(live):
            live.trouble_since = now
        if live.is_done or self._expired(live, now) or not self._judging:
            return
        if live.waits_for is not None:
            if live.waits_for is not WaitsFor.PAUSE or now >= live.not_before:
                self._sender.dispatch(live)
            return
        holder = live.tokenizer if live.phase is Phase.TOKENIZING else live.scheduler
        if not self._is_taken(live) and now >= self._taken_by(live):
            self._sender.send_on(live, "not taken", avoid=holder, holder_died=False)
        elif holder is not None and self._silent_choices(live, now):
            uids = silent.setdefault(holder, [])
            if len(uids) < MAX_PROBED:
                uids.append(live.uid)

    def _next_look(self, live: LiveRequest, now: float) -> float:
        """When something may have become wrong with a request, if nothing is heard of it until then."""
        if not self._judging or not self._text_is_made or live.waits_for is not None or live.trouble_since is not None:
            return now
        timings = self._timings
        moments = [choice.asks_at(timings.silence_s, timings.strike_s) for choice in live.unfinished()]
        if not self._is_taken(live):
            moments.append(self._taken_by(live))
        return max(now, min(moments, default=now))

    @staticmethod
    def _is_taken(live: LiveRequest) -> bool:
        return live.taken if live.phase is Phase.TOKENIZING else all(choice.taken for choice in live.unfinished())

    def _taken_by(self, live: LiveRequest) -> float:
        return live.sent_at + self._timings.taken_s

    def _silent_choices(self, live: LiveRequest, now: float) -> list[Choice]:
        silence_s, strike_s = self._timings.silence_s, self._timings.strike_s
        return [choice for choice in live.unfinished() if now >= choice.asks_at(silence_s, strike_s)]

    # ------------------------------------------------------------ probing

    async def _probe(self, silent: dict[str, list[str]]) -> None:
        try:
            asked = {uid for uids in silent.values() for uid in uids}
            attempts = {uid: live.attempt for uid, live in self._lives.items() if uid in asked}
            answers: dict[str, ProbeAnswer] = {}

            async def ask(instance: str, uids: list[str]) -> None:
                answer = await self._ask(instance, uids)
                if answer is not None:
                    answers[instance] = answer

            async with anyio.create_task_group() as tasks:
                for instance, uids in silent.items():
                    tasks.start_soon(ask, instance, uids)
            for uid, attempt in attempts.items():
                live = self._lives.get(uid)
                if live is not None and live.attempt == attempt and not live.is_done:
                    self._judge(live, answers)
                    self._ended(live)
        finally:
            self._probing = False

    async def _ask(self, instance: str, uids: list[str]) -> ProbeAnswer | None:
        """The stage's answer; an empty one when nobody listens there; None when it is unknown."""
        actor = self._actor
        subject = actor.subjects.control(instance, "probe")
        try:
            payload = await actor.connection.request(
                subject, encode_json(Probe(tuple(uids))), timeout_s=actor.settings.timings.probe_timeout_s
            )
        except NoResponders:
            actor.doubt(instance)
            return ProbeAnswer(instance, {})
        except BusError:
            return None  # a frozen holder is the directory's to judge, a lost bus the tick's
        try:
            raise_if_error(payload)
            return probe_answer_decoder.decode(payload)
        except (RemoteError, MalformedMessage) as error:
            actor.log.warning("probe_not_answered", instance=instance, reason=error.message)
            return None

    def _judge(self, live: LiveRequest, answers: dict[str, ProbeAnswer]) -> None:
        holder = live.tokenizer if live.phase is Phase.TOKENIZING else live.scheduler
        now = self._actor.clock.monotonic()
        silent = self._silent_choices(live, now)
        for choice in silent:
            choice.asked_at = now
        answer = answers.get(holder) if holder is not None else None
        if answer is None:
            return
        known = {sequence.choice: sequence for sequence in answer.sequences.get(live.uid, ())}
        for choice in silent:
            if self._is_well(live, choice, known):
                choice.heard(now)
            else:
                choice.strikes += 1
        self._agenda.note(live.uid, now)  # a doubtful one is asked about sooner
        if any(choice.strikes >= STRIKES for choice in silent):
            self._sender.send_on(live, "lost by its holder", avoid=None, holder_died=False)

    @staticmethod
    def _is_well(live: LiveRequest, choice: Choice, known: Mapping[int, ProbedSequence]) -> bool:
        if live.phase is Phase.TOKENIZING:
            return any(sequence.attempt == live.attempt for sequence in known.values())
        there = known.get(choice.number)
        if there is None or there.attempt != live.attempt:
            return False
        if there.state == "waiting":
            return True
        return there.state == "running" and there.next_index <= len(choice.output_ids)
