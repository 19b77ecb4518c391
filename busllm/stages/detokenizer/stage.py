"""The detokenizer's behaviour: token ids in, text out, and back to the owner of each request.

Owns: each sequence's decode state and stop strings; one batch in, one batch per frontend out.
Does not know: how tokens are chosen, HTTP.
Next on the path: `requests/owner.py` in the frontend.

Rows carry the position of their first token: repeated tokens are skipped, a gap is a hole, which the owner is told
about (`lost`) so that it sends the sequence on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread

from busllm.actors.actor import Actor
from busllm.actors.behaviour import MessageHandler
from busllm.actors.directory import PeerChange, PeerNews
from busllm.bus.protocol import BusEvent, Message
from busllm.errors import InvalidRequest, Lost
from busllm.messages.codec import encode, encode_json, unpack_ids
from busllm.messages.control import ProbeAnswer, ProbedSequence, probe_decoder
from busllm.messages.parts import Joiner, Part
from busllm.messages.to_detokenizer import ACKNOWLEDGED_EVERY, SequenceOpened, StepTokens, decoder
from busllm.messages.to_everyone import decode_abort
from busllm.messages.to_frontend import Taken, TokenText, failed
from busllm.messages.to_scheduler import StopMatched
from busllm.plan import TokenLogprobs
from busllm.requests.tombstones import Tombstones
from busllm.stages.detokenizer.open_sequence import OpenSequence
from busllm.stages.detokenizer.text_rows import TextRows
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
        self._tombstones = Tombstones()
        self._joiner = Joiner()
        self._num_tokens = 0
        self._num_finished = 0

    async def start(self, actor: Actor) -> None:
        """See `Behaviour`."""
        self._actor = actor
        actor.report_progress("loading the tokenizer")
        self._tokenizer = await anyio.to_thread.run_sync(self._load)

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
        """See `Behaviour`: holes show in the indexes, and owners ask about silence."""

    def peer_changed(self, change: PeerChange) -> None:
        """See `Behaviour`: sequences of a scheduler or an owner that is gone are dropped."""
        if change.news is not PeerNews.GONE:
            return
        gone = change.peer.instance
        for key, sequence in list(self._open.items()):
            if gone in (sequence.scheduler, sequence.opened.frontend):
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
        if message.reply is not None and batch.number % ACKNOWLEDGED_EVERY == 0:
            self._actor.try_publish(message.reply, str(batch.number).encode())

    def _take_rows(self, batch: StepTokens) -> None:
        handles, indexes = unpack_ids(batch.handles).tolist(), unpack_ids(batch.indexes).tolist()
        offsets, token_ids = unpack_ids(batch.offsets).tolist(), unpack_ids(batch.token_ids).tolist()
        finished, logprobs = dict(batch.finished), dict(batch.logprobs)
        prompt_logprobs = {row: (ids, values) for row, ids, values in batch.prompt_logprobs}
        for row, handle in enumerate(handles):
            key = (batch.scheduler, handle)
            sequence = self._open.get(key)
            if sequence is None:
                continue
            new_ids = token_ids[offsets[row] : offsets[row + 1]]
            if indexes[row] > sequence.next_index:
                self._lose(key, f"tokens {sequence.next_index} to {indexes[row] - 1} did not arrive")
                continue
            skip = sequence.next_index - indexes[row]
            text_row = self._push(key, sequence, new_ids[skip:], logprobs.get(row, ())[skip:], finished.get(row))
            if row in prompt_logprobs:
                ids, values = prompt_logprobs[row]
                made = self._as_text(unpack_ids(ids).tolist(), values)
                self._gathered(sequence).prompt_logprobs.append((text_row, made))

    # ------------------------------------------------------------ sequences

    def _open_sequence(self, scheduler: str, opened: SequenceOpened) -> None:
        if self._tombstones.covers(opened.uid, opened.attempt):
            return
        for key in list(self._of_uid.get(opened.uid, ())):
            if self._open[key].opened.choice == opened.choice:
                self._close(key)
        sequence = OpenSequence(scheduler, opened, self._tokenizer)
        key = (scheduler, opened.handle)
        self._open[key] = sequence
        self._of_uid[opened.uid].add(key)
        self._actor.trace.begin(opened.uid)
        taken = Taken(opened.uid, opened.attempt, self.kind, self._actor.instance)
        self._actor.try_publish(self._actor.subjects.reply(opened.frontend, opened.uid), encode(taken))
        self._replay(key, sequence)

    def _replay(self, key: Key, sequence: OpenSequence) -> None:
        """Brings a new decoder to where the client is; what it already has is not sent again."""
        output_ids = unpack_ids(sequence.opened.output_ids).tolist()
        if not output_ids:
            return
        delta = sequence.decoder.replay(output_ids, sequence.opened.delivered_chars)
        sequence.next_index = len(output_ids)
        if delta.stopped:
            row = self._gathered(sequence).add(sequence, len(output_ids), delta.text, ())
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
            rows.logprobs.append((row, self._as_text(kept, logprobs)))
        if step.finish_reason is not None:
            if finish_reason is None:  # the engine does not know yet
                opened = sequence.opened
                self._stopped.setdefault(sequence.scheduler, []).append((opened.uid, opened.choice, opened.attempt))
            self._end(key, sequence, row, step.finish_reason, sequence.next_index)
        return row

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
        opened = self._open[key].opened
        error = Lost(f"The detokenizer lost a part of the output: {reason}.")
        message = failed(opened.uid, opened.attempt, self.kind, error)
        self._actor.try_publish(self._actor.subjects.reply(opened.frontend, opened.uid), encode(message))
        self._close(key)

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
        for key in list(self._of_uid.get(uid, ())):
            opened = self._open[key].opened
            if self._tombstones.covers(uid, opened.attempt):
                self._actor.trace.record(uid, "aborted", choice=opened.choice)
                self._close(key)

    # ------------------------------------------------------------ log probabilities

    def _as_text(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> tuple[TokenText, ...]:
        return tuple(self._token_text(token_id, one) for token_id, one in zip(token_ids, logprobs, strict=False))

    def _token_text(self, token_id: int, logprobs: TokenLogprobs | None) -> TokenText:
        token_bytes = self._tokenizer.token_bytes
        if logprobs is None:
            return TokenText(token_bytes(token_id), None)
        top = tuple((other, token_bytes(other), value) for other, value in logprobs.top)
        return TokenText(token_bytes(token_id), logprobs.chosen, top)

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
