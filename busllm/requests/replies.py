"""What replies of stages mean for the requests of an owner.

Owns: the reading of `Taken`, `Tokenized`, `Failed`, `StepText` and of "nobody listens"; what is repeated is ignored,
what is ahead is a hole, what belongs to another attempt is not looked at.
Does not know: time (`watch.py`), how a request is sent on (`sending.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import assert_never

from busllm.actors.actor import Actor
from busllm.bus.protocol import Message
from busllm.errors import Draining, MalformedMessage, QueueFull, RemoteError
from busllm.messages.columns import unpack_column, unpack_rows
from busllm.messages.control import ERROR_PREFIX, raise_if_error
from busllm.messages.parts import Joiner, Part
from busllm.messages.to_frontend import Failed, StepText, Taken, ToFrontend, Tokenized, TokenText, decoder, remote_error
from busllm.messages.to_tokenizer import ChatPrompt
from busllm.requests.generation import ChoiceDelta
from busllm.requests.live import Choice, LiveRequest, Phase, WaitsFor
from busllm.requests.sending import Sender


class Replies:
    """Reads the replies of one owner.

    Args:
        actor, sender: of the owner.
        lives: its open requests.
        textless: uids of those that have no text yet; a first text takes one out.
        ended: called with each request that a reply may have ended.
    """

    def __init__(
        self,
        actor: Actor,
        sender: Sender,
        lives: Mapping[str, LiveRequest],
        textless: set[str],
        ended: Callable[[LiveRequest], None],
    ) -> None:
        self._actor = actor
        self._sender = sender
        self._lives = lives
        self._textless = textless
        self._ended = ended
        self._joiner = Joiner()

    def arrived(self, message: Message) -> None:
        """Takes one message of the reply subjects."""
        if message.no_responders:
            self._nobody_listens(message.subject.rpartition(".")[2])
            return
        if message.payload.startswith(ERROR_PREFIX):
            self._could_not_read(message.subject.rpartition(".")[2], message.payload)
            return
        reply = decoder.decode(message.payload)
        if isinstance(reply, Part):
            whole = self._joiner.add(reply)
            if whole is None:
                return
            reply = decoder.decode(whole)
        self._take_reply(reply)

    def _take_reply(self, reply: ToFrontend) -> None:
        match reply:
            case StepText():
                self._take_text(reply)
            case Taken():
                self._take_taken(reply)
            case Tokenized():
                self._take_tokenized(reply)
            case Failed():
                self._take_failed(reply)
            case Part():
                raise MalformedMessage("A part inside a part.")
            case _:
                assert_never(reply)

    def _current(self, uid: str, attempt: int) -> LiveRequest | None:
        live = self._lives.get(uid)
        if live is None or live.attempt != attempt or live.is_done:
            return None
        live.heard_at = self._actor.clock.monotonic()
        return live

    def _take_taken(self, taken: Taken) -> None:
        live = self._current(taken.uid, taken.attempt)
        if live is None:
            return
        match taken.stage:
            case "tokenizer":
                live.taken = live.taken or live.phase is Phase.TOKENIZING
                live.trouble_since = None
            case "scheduler":
                self._sender.hold(live, tokenizer=None, scheduler=taken.instance)
                live.phase, live.was_scheduled, live.trouble_since = Phase.SCHEDULED, True, None
                for number in taken.choices or range(len(live.choices)):
                    choice = choice_of(live, number)
                    choice.taken = True
                    choice.heard(live.heard_at)
            case "detokenizer":
                live.detokenizer = taken.instance
            case _:
                pass  # a kind of stage that this version does not know

    def _take_tokenized(self, tokenized: Tokenized) -> None:
        live = self._current(tokenized.uid, tokenized.attempt)
        if live is None:
            return
        live.prompt_ids = tokenized.prompt_ids
        if live.phase is Phase.TOKENIZING:
            live.phase, live.sent_at = Phase.SCHEDULED, live.heard_at
            self._sender.hold(live, tokenizer=None, scheduler=tokenized.scheduler)
            if tokenized.scheduler is None:
                self._sender.let_wait(live, WaitsFor.SCHEDULER)

    def _take_failed(self, failed: Failed) -> None:
        live = self._current(failed.uid, failed.attempt)
        if live is None:
            return
        if failed.retryable and failed.code != QueueFull.code:
            holders = {"tokenizer": live.tokenizer, "scheduler": live.scheduler, "detokenizer": live.detokenizer}
            avoid = holders.get(failed.stage) if failed.code == Draining.code else None
            self._sender.send_on(live, failed.code, avoid=avoid, holder_died=False)
        else:
            error = remote_error(failed)
            if error.param == "prompt" and isinstance(live.request.prompts[0], ChatPrompt):
                error.param = "messages"  # a stage that sees token ids cannot know what they were made of
            live.fail(error)
            self._sender.abort(live)
        self._ended(live)

    def _take_text(self, batch: StepText) -> None:
        num_rows = len(batch.uids)
        if len(batch.texts) != num_rows:
            raise MalformedMessage(f"A batch has {num_rows} rows and {len(batch.texts)} texts.")
        indexes, choices = unpack_column(batch.indexes, num_rows), unpack_column(batch.choices, num_rows)
        attempts = unpack_column(batch.attempts, num_rows)
        rows = unpack_rows(batch.offsets, batch.token_ids, num_rows)
        finished = {row: (reason, usage) for row, reason, usage in batch.finished}
        logprobs, prompt_logprobs = dict(batch.logprobs), dict(batch.prompt_logprobs)
        now = self._actor.clock.monotonic()
        for row, uid in enumerate(batch.uids):
            live = self._lives.get(uid)
            if live is None or live.attempt != attempts[row] or live.is_done:
                continue
            live.heard_at = now
            choice, new_ids, text = choice_of(live, choices[row]), rows[row], batch.texts[row]
            choice.heard(now)
            have = len(choice.output_ids)
            repeated = bool(new_ids) and indexes[row] + len(new_ids) <= have
            if choice.finished or (repeated and row not in finished):
                continue
            if indexes[row] != have and not repeated:
                self._sender.send_on(live, "a hole in the output", avoid=None, holder_died=False)
                continue
            live.detokenizer, live.trouble_since = batch.detokenizer, None
            scores: tuple[TokenText, ...] = ()
            if repeated:
                text, new_ids = "", []
            else:
                scores = logprobs.get(row, ())
                self._tell(live, choice.number, text, new_ids)
            if new_ids:
                live.holders_lost.clear()
                live.fruitless = 0
            reason, usage = finished.get(row, (None, None))
            scored = prompt_logprobs.get(row)
            live.give(ChoiceDelta(choice.number, text, tuple(new_ids), scores, scored, reason, usage))
            if reason is not None:
                self._ended(live)

    def _tell(self, live: LiveRequest, choice: int, text: str, token_ids: list[int]) -> None:
        trace = self._actor.trace
        if text and not live.has_text:
            live.has_text = True
            self._textless.discard(live.uid)
            trace.record(live.uid, "first_text")
        if trace.tells_tokens and token_ids:
            trace.record(live.uid, "delta", choice=choice, token_ids=token_ids)

    def _could_not_read(self, uid: str, payload: bytes) -> None:
        """A stage could not make anything of what it was sent: sending it again would not help."""
        live = self._lives.get(uid)
        if live is None or live.is_done:
            return
        try:
            raise_if_error(payload)
        except RemoteError as error:
            live.fail(error)
            self._sender.abort(live)
            self._ended(live)

    def _nobody_listens(self, uid: str) -> None:
        live = self._lives.get(uid)
        if live is None or live.is_done:
            return
        holder = live.tokenizer if live.phase is Phase.TOKENIZING else live.scheduler
        if holder is None:
            return
        attempt = live.attempt
        self._actor.doubt(holder)  # others that it holds may go on elsewhere, this one among them
        if live.attempt == attempt:
            self._sender.send_on(live, f"nobody listens at {holder}", avoid=holder, holder_died=False)


def choice_of(live: LiveRequest, number: int) -> Choice:
    """A choice of a request.

    Raises:
        MalformedMessage: it has none of that number.
    """
    if not 0 <= number < len(live.choices):
        raise MalformedMessage(f"Choice {number} of a request with {len(live.choices)} choices.")
    return live.choices[number]
