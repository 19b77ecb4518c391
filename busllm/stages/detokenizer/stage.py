"""The detokenizer's behaviour: token ids in, text out, and back to the owner of each request.

Owns: each sequence's decode state and stop strings; one batch in, one batch per frontend out.
Does not know: how tokens are chosen, HTTP.
Next on the path: `requests/owner.py` in the frontend.

Rows carry the position of their first token: repeated tokens are skipped, a gap is a hole, which the owner is told
about (`lost`) so that it sends the sequence on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import anyio.to_thread

from busllm.actors.actor import Actor
from busllm.actors.behaviour import MessageHandler
from busllm.actors.directory import PeerChange, PeerNews
from busllm.bus.protocol import BusEvent, Message, Overflow, Reconnected
from busllm.errors import BusllmError, InvalidRequest, Lost
from busllm.messages.codec import encode, encode_json, unpack_ids
from busllm.messages.columns import unpack_column, unpack_rows
from busllm.messages.control import ProbeAnswer, ProbedSequence, probe_decoder
from busllm.messages.parts import Joiner, Part
from busllm.messages.to_detokenizer import ACKNOWLEDGED_EVERY, SequenceOpened, StepTokens, decoder
from busllm.messages.to_everyone import decode_abort
from busllm.messages.to_frontend import Taken, failed
from busllm.messages.to_scheduler import StopMatched
from busllm.plan import TokenLogprobs
from busllm.requests.orphans import OrphanWatch
from busllm.requests.tombstones import Tombstones
from busllm.stages.detokenizer.open_sequence import OpenSequence
from busllm.stages.detokenizer.text_rows import TextRows
from busllm.stages.detokenizer.token_texts import token_texts
from busllm.text.tokenizer import Tokenizer

Key = tuple[str, int]  # scheduler instance, handle


class DetokenizerStage:
    """Behaviour of a detokenizer actor."""

    kind = "detokenizer"
    is_unique = True

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._open: dict[Key, OpenSequence] = {}
        self._of_uid: dict[str, set[Key]] = defaultdict(set)
        self._rows: dict[str, TextRows] = {}
        self._stopped: dict[str, list[tuple[str, int, int]]] = {}
        self._acknowledged: dict[str, int] = {}  # scheduler → number of the batch acknowledged last
        self._tombstones = Tombstones()
        self._joiner = Joiner()
        self._num_tokens = 0
        self._num_finished = 0

    async def start(self, actor: Actor) -> None:
        """See `Behaviour`."""
        self._actor = actor
        self._orphans = OrphanWatch(actor, self._held_by_owner, self._drop)
        actor.report_progress("loading the tokenizer")
        self._tokenizer = await anyio.to_thread.run_sync(self._load)
        actor.tasks.start_soon(self._orphans.run)

    def inboxes(self) -> Mapping[str, MessageHandler]:
        """See `Behaviour`."""
        subjects = self._actor.subjects
        return {
            subjects.detokenize(self._actor.instance): self._batch_arrived,
            subjects.abort("*"): self._abort_arrived,
        }

    def received_all(self) -> None:
        """See `Behaviour`: one batch per frontend, one per scheduler."""
        actor = self._actor
        rows, self._rows = self._rows, {}
        for frontend, gathered in rows.items():
            actor.try_publish(actor.subjects.reply_step(frontend), encode(gathered.message(actor.instance)))
        stopped, self._stopped = self._stopped, {}
        for scheduler, sequences in stopped.items():
            actor.try_publish(actor.subjects.stop(scheduler), encode(StopMatched(tuple(sequences))))

    def bus_event(self, event: BusEvent) -> None:
        """See `Behaviour`: holes show in the indexes, and owners ask about silence; an abort may be missed."""
        if isinstance(event, Reconnected | Overflow):
            self._orphans.poke()

    def peer_changed(self, change: PeerChange) -> None:
        """See `Behaviour`: sequences of a scheduler or an owner that is gone are dropped."""
        self._orphans.peer_changed(change)
        if change.news is PeerNews.GONE:
            self._acknowledged.pop(change.peer.instance, None)
            for key, sequence in list(self._open.items()):
                if sequence.scheduler == change.peer.instance:
                    self._close(key)

    def load(self) -> dict[str, float]:
        """See `Behaviour`."""
        return {"requests": float(len(self._open))}

    def statistics(self) -> dict[str, Any]:
        """See `Behaviour`."""
        return {"open_sequences": len(self._open), "tokens": self._num_tokens, "finished": self._num_finished}

    async def drain(self) -> None:
        """See `Behaviour`: owners are asked to send on what is still open."""
        for key in list(self._open):
            self._lose(key, "the detokenizer is shutting down")
        self.received_all()
        await self._actor.connection.flush()

    # ------------------------------------------------------------ inbox

    def _batch_arrived(self, message: Message) -> None:
        batch = decoder.decode(message.payload)
        if isinstance(batch, Part):
            whole = self._joiner.add(batch)
            batch = decoder.decode(whole) if whole is not None else batch
        if isinstance(batch, Part):
            return
        for opened in batch.opened:
            self._open_sequence(batch.scheduler, opened)
        self._take_rows(batch)
        if message.reply is not None:
            self._acknowledge(batch, message.reply)

    def _acknowledge(self, batch: StepTokens, reply: str) -> None:
        last = self._acknowledged.get(batch.scheduler, 0)
        if batch.number < last:  # the scheduler has begun to count anew
            last = 0
        if batch.number - last >= ACKNOWLEDGED_EVERY:
            self._actor.try_publish(reply, str(batch.number).encode())
            last = batch.number
        self._acknowledged[batch.scheduler] = last

    def _take_rows(self, batch: StepTokens) -> None:
        handles: list[int] = unpack_ids(batch.handles).tolist()
        indexes = unpack_column(batch.indexes, len(handles))
        rows = unpack_rows(batch.offsets, batch.token_ids, len(handles))
        finished, logprobs = dict(batch.finished), dict(batch.logprobs)
        prompt_logprobs = {row: (ids, values) for row, ids, values in batch.prompt_logprobs}
        for row, handle in enumerate(handles):
            key = (batch.scheduler, handle)
            sequence = self._open.get(key)
            if sequence is None:
                continue
            if indexes[row] > sequence.next_index:
                self._lose(key, f"tokens {sequence.next_index} to {indexes[row] - 1} did not arrive")
                continue
            skip = sequence.next_index - indexes[row]
            try:
                text_row = self._push(key, sequence, rows[row][skip:], logprobs.get(row, ())[skip:], finished.get(row))
                if row in prompt_logprobs:
                    ids, values = prompt_logprobs[row]
                    made = token_texts(self._tokenizer, unpack_ids(ids).tolist(), values)
                    self._gathered(sequence).prompt_logprobs.append((text_row, made))
            except Exception:  # noqa: BLE001 - the stage boundary: one sequence's fault must not be that of all
                self._break(sequence.opened)

    # ------------------------------------------------------------ sequences

    def _open_sequence(self, scheduler: str, opened: SequenceOpened) -> None:
        if self._tombstones.covers(opened.uid, opened.attempt):
            return
        self._actor.trace.begin(opened.uid)
        # First of all, so that an owner knows who held a sequence that brings its detokenizer down.
        taken = Taken(opened.uid, opened.attempt, self.kind, self._actor.instance, (opened.choice,))
        self._actor.try_publish(self._actor.subjects.reply(opened.frontend, opened.uid), encode(taken))
        for key in list(self._of_uid.get(opened.uid, ())):
            earlier = self._open[key].opened
            if earlier.choice == opened.choice and earlier.attempt <= opened.attempt:
                self._close(key)
        try:
            sequence = OpenSequence(scheduler, opened, self._tokenizer)
            key = (scheduler, opened.handle)
            self._open[key] = sequence
            self._of_uid[opened.uid].add(key)
            self._replay(key, sequence)
        except Exception:  # noqa: BLE001 - the stage boundary: one sequence's fault must not be that of all
            self._break(opened)

    def _replay(self, key: Key, sequence: OpenSequence) -> None:
        """Brings a new decoder to where the client is; what it already has is not sent again."""
        output_ids = unpack_ids(sequence.opened.output_ids).tolist()
        if not output_ids:
            return
        delta = sequence.decoder.replay(output_ids, sequence.opened.delivered_chars)
        sequence.next_index = len(output_ids)
        if delta.stopped:
            row = self._gathered(sequence).add(sequence, len(output_ids), delta.text, ())
            self._stop_engine(sequence)
            self._end(key, sequence, row, "stop", delta.num_tokens_kept)
        elif delta.text:
            self._gathered(sequence).add(sequence, len(output_ids), delta.text, ())

    def _push(
        self,
        key: Key,
        sequence: OpenSequence,
        new_ids: list[int],
        logprobs: tuple[TokenLogprobs, ...],
        finish_reason: str | None,
    ) -> int:
        step = sequence.decoder.take(new_ids, finish_reason)
        kept = new_ids[: step.num_tokens_kept]
        index = sequence.next_index
        sequence.next_index += len(kept)
        self._num_tokens += len(kept)
        rows = self._gathered(sequence)
        row = rows.add(sequence, index, step.text, kept)
        if logprobs:
            rows.logprobs.append((row, token_texts(self._tokenizer, kept, logprobs)))
        if step.finish_reason is not None:
            if finish_reason is None:
                self._stop_engine(sequence)
            self._end(key, sequence, row, step.finish_reason, sequence.next_index)
        return row

    def _stop_engine(self, sequence: OpenSequence) -> None:
        """A stop string was found: the engine does not know yet."""
        opened = sequence.opened
        self._stopped.setdefault(sequence.scheduler, []).append((opened.uid, opened.choice, opened.attempt))

    def _gathered(self, sequence: OpenSequence) -> TextRows:
        frontend = sequence.opened.frontend
        rows = self._rows.get(frontend)
        if rows is None:
            rows = self._rows[frontend] = TextRows()
        return rows

    def _end(self, key: Key, sequence: OpenSequence, row: int, reason: str, completion_tokens: int) -> None:
        self._gathered(sequence).finished.append((row, reason, sequence.usage(completion_tokens)))
        self._num_finished += 1
        opened = sequence.opened
        self._actor.trace.record(opened.uid, "finished", choice=opened.choice, reason=reason, tokens=completion_tokens)
        self._close(key)

    def _lose(self, key: Key, reason: str) -> None:
        self._fail(self._open[key].opened, Lost(f"The detokenizer lost a part of the output: {reason}."))
        self._close(key)

    def _break(self, opened: SequenceOpened) -> None:
        """A sequence cannot be decoded, for a reason that nobody thought of."""
        self._actor.log.exception("decoding_failed", uid=opened.uid)
        self._fail(opened, BusllmError("The text of the answer could not be made."))
        self._drop(opened.uid, opened.attempt)

    def _fail(self, opened: SequenceOpened, error: BusllmError) -> None:
        message = failed(opened.uid, opened.attempt, self.kind, error)
        self._actor.try_publish(self._actor.subjects.reply(opened.frontend, opened.uid), encode(message))

    def _close(self, key: Key) -> None:
        sequence = self._open.pop(key, None)
        if sequence is not None:
            keys = self._of_uid[sequence.opened.uid]
            keys.discard(key)
            if not keys:
                del self._of_uid[sequence.opened.uid]

    def _abort_arrived(self, message: Message) -> None:
        uid, attempt = message.subject.rpartition(".")[2], decode_abort(message.payload)
        self._tombstones.bury(uid, attempt)
        self._drop(uid, attempt)

    def _drop(self, uid: str, attempt: int | None) -> None:
        for key in list(self._of_uid.get(uid, ())):
            opened = self._open[key].opened
            if attempt is None or opened.attempt <= attempt:
                self._actor.trace.record(uid, "aborted", choice=opened.choice)
                self._close(key)

    def _held_by_owner(self) -> dict[str, dict[str, int]]:
        held: dict[str, dict[str, int]] = defaultdict(dict)
        for sequence in self._open.values():
            held[sequence.opened.frontend][sequence.opened.uid] = sequence.opened.attempt
        return held

    # ------------------------------------------------------------ control

    async def control(self, verb: str, question: bytes) -> bytes:
        """Answers `probe`."""
        if verb != "probe":
            raise InvalidRequest(f"A detokenizer knows no control verb {verb!r}.")
        sequences = {}
        for uid in probe_decoder.decode(question).uids:
            known = [self._open[key] for key in self._of_uid.get(uid, ())]
            if known:
                sequences[uid] = tuple(
                    ProbedSequence(one.opened.choice, one.opened.attempt, "running", one.next_index) for one in known
                )
        return encode_json(ProbeAnswer(self._actor.instance, sequences))
