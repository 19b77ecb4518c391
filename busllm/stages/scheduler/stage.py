"""The scheduler's behaviour: sequences in, token batches out, the engine beside it.

Owns: what a message, a sequence's owner and the bus mean for the engine: taking over, adopting, aborting, holding
back, dropping orphans.
Does not know: whom the engine computes next (`engine/planner.py`), text.
Next on the path: `engine_thread.py`, then `outbound.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, assert_never

import anyio

from busllm.actors.actor import Actor
from busllm.actors.behaviour import MessageHandler
from busllm.actors.directory import PeerChange, PeerNews
from busllm.bus.protocol import BusEvent, Disconnected, Message, Overflow, PermissionRefused, Reconnected
from busllm.engine.engine import Engine
from busllm.engine.sequence import SequenceEvent, SequenceTokens, StepOutput
from busllm.errors import BusllmError, Draining, EngineError, InvalidRequest
from busllm.messages.codec import encode, encode_json, unpack_ids
from busllm.messages.control import ProbeAnswer, probe_decoder
from busllm.messages.parts import Joiner, Part
from busllm.messages.to_everyone import decode_abort
from busllm.messages.to_frontend import Taken, failed
from busllm.messages.to_scheduler import Generate, StopMatched, decoder
from busllm.requests.orphans import OrphanWatch
from busllm.requests.tombstones import Tombstones
from busllm.stages.load_progress import LoadProgress
from busllm.stages.scheduler.engine_statistics import engine_statistics
from busllm.stages.scheduler.engine_thread import Crashed, EngineOutput, EngineThread, Refused
from busllm.stages.scheduler.held_sequence import HeldSequence
from busllm.stages.scheduler.held_table import HeldTable, Key
from busllm.stages.scheduler.outbound import Outbound

DETOKENIZER = "detokenizer"


class SchedulerStage:
    """Behaviour of rank 0."""

    kind = "scheduler"
    is_unique = True

    def __init__(self, make_engine: Callable[[], Engine], progress: LoadProgress | None = None) -> None:
        """Makes a stage that has not started.

        Args:
            make_engine: called in the engine's thread.
            progress: what it tells about its loading.
        """
        self._progress = progress or LoadProgress()
        self._engine = EngineThread(make_engine)
        self._table = HeldTable()
        self._tombstones = Tombstones()
        self._joiner = Joiner()
        self._held_back: frozenset[Key] = frozenset()
        self._draining = False
        self._empty = anyio.Event()

    async def start(self, actor: Actor) -> None:
        """See `Behaviour`."""
        self._actor = actor
        self._orphans = OrphanWatch(actor, self._table.by_owner, self._drop)
        self._outbound = Outbound(actor, self._table)
        actor.report_progress("loading the model")
        self._progress.attach(actor)
        await self._engine.start()
        actor.tasks.start_soon(self._output_loop)
        actor.tasks.start_soon(self._stall_watch)
        actor.tasks.start_soon(self._orphans.run)

    def inboxes(self) -> Mapping[str, MessageHandler]:
        """See `Behaviour`."""
        subjects, instance = self._actor.subjects, self._actor.instance
        return {
            subjects.generate(instance, "*"): self._work_arrived,
            subjects.stop(instance): self._work_arrived,
            subjects.abort("*"): self._abort_arrived,
            self._outbound.acknowledgements: self._outbound.acknowledged,
        }

    def received_all(self) -> None:
        """See `Behaviour`."""
        self._flush()

    def load(self) -> dict[str, float]:
        """See `Behaviour`."""
        return {"requests": float(len(self._table))}

    def statistics(self) -> dict[str, Any]:
        """See `Behaviour`."""
        return {"sequences": len(self._table), **engine_statistics(self._engine.statistics)}

    async def drain(self) -> None:
        """See `Behaviour`: what runs may finish; what is left when time is up goes on elsewhere."""
        self._draining = True
        try:
            while len(self._table):
                self._empty = anyio.Event()
                await self._empty.wait()
        finally:
            error = Draining("The scheduler is shutting down.")
            for generate in {held.generate.uid: held.generate for held in self._table}.values():
                self._fail(generate, error)
                self._drop(generate.uid, None)
            with anyio.CancelScope(shield=True):
                await self._engine.close()

    # ------------------------------------------------------------ inbox

    def _work_arrived(self, message: Message) -> None:
        work = decoder.decode(message.payload)
        if isinstance(work, Part):
            whole = self._joiner.add(work)
            work = decoder.decode(whole) if whole is not None else work
        match work:
            case Generate():
                self._take(work)
            case StopMatched():
                for uid, choice, attempt in work.sequences:
                    self._stop(uid, choice, attempt)
            case Part():
                pass  # not whole yet
            case _:
                assert_never(work)

    def _take(self, generate: Generate) -> None:
        if self._tombstones.covers(generate.uid, generate.attempt):
            return
        actor = self._actor
        actor.trace.begin(generate.uid)
        if self._draining:
            self._fail(generate, Draining("The scheduler is shutting down."))
            return
        choices = tuple(start.choice for start in generate.choices)
        taken = Taken(generate.uid, generate.attempt, self.kind, actor.instance, choices)
        actor.try_publish(actor.subjects.reply(generate.frontend, generate.uid), encode(taken))
        prompt_ids = unpack_ids(generate.prompt_ids)
        for start in generate.choices:
            held = HeldSequence(generate, start)
            if self._table.add(held):
                self._engine.submit(held.request(prompt_ids))

    def _stop(self, uid: str, choice: int, attempt: int) -> None:
        held = self._table.get(uid, choice, attempt)
        if held is not None:
            self._engine.stop(uid, choice, attempt)
            self._remove(held, finished=True)

    def _abort_arrived(self, message: Message) -> None:
        uid, attempt = message.subject.rpartition(".")[2], decode_abort(message.payload)
        self._tombstones.bury(uid, attempt)
        self._drop(uid, attempt)

    def _drop(self, uid: str, attempt: int | None) -> None:
        """Ends sequences of a request up to an attempt (None: all), wherever they are in the engine."""
        ended = [held for held in self._table.of_uid(uid) if attempt is None or held.generate.attempt <= attempt]
        if ended:
            self._engine.abort(uid, attempt)
            for held in ended:
                self._remove(held, finished=False)

    def _remove(self, held: HeldSequence, *, finished: bool) -> None:
        self._table.remove(held, finished=finished)
        if not len(self._table):
            self._empty.set()

    def _fail(self, generate: Generate, error: BusllmError) -> None:
        message = failed(generate.uid, generate.attempt, self.kind, error)
        self._actor.try_publish(self._actor.subjects.reply(generate.frontend, generate.uid), encode(message))

    # ------------------------------------------------------------ engine output

    async def _output_loop(self) -> None:
        while True:
            for output in await self._engine.receive():
                self._take_output(output)
            self._flush()

    def _take_output(self, output: EngineOutput) -> None:
        match output:
            case StepOutput():
                for event in output.events:
                    self._take_event(event)
                for tokens in output.tokens:
                    self._take_tokens(tokens)
            case Refused():
                request = output.request
                held = self._table.get(request.uid, request.choice, request.attempt)
                if held is not None:
                    self._fail(held.generate, output.error)
                    self._actor.trace.record(request.uid, "failed", code=output.error.code)
                    self._drop(request.uid, request.attempt)
            case Crashed():
                raise output.error
            case _:
                assert_never(output)

    def _take_event(self, event: SequenceEvent) -> None:
        held = self._table.get(event.uid, event.choice)
        if event.name == "admitted" and held is not None and not held.is_admitted:
            held.is_admitted = True
            held.cached_tokens = int(event.data.get("cached_tokens", 0))
        self._actor.trace.record(event.uid, event.name, at_s=event.at_s, choice=event.choice, **event.data)

    def _take_tokens(self, tokens: SequenceTokens) -> None:
        held = self._table.get(tokens.uid, tokens.choice, tokens.attempt)
        if held is None:
            return
        held.next_index = tokens.index + len(tokens.token_ids)
        self._outbound.send(held, tokens)
        if tokens.finish_reason is not None and not held.must_wait:
            self._remove(held, finished=True)

    def _flush(self) -> None:
        """Sends what was gathered, and tells the engine which sequences stay out of its steps."""
        self._outbound.flush()
        held_back = self._outbound.held_back()
        if held_back != self._held_back:
            self._held_back = held_back
            self._engine.hold(held_back)

    def stalled_for_s(self) -> float | None:
        """How long the running step has lasted, when that is too long for a slow one."""
        timings = self._actor.settings.timings
        return self._engine.stalled_for_s(timings.stall_base_s, timings.stall_factor)

    async def _stall_watch(self) -> None:
        while True:
            await self._actor.clock.sleep(self._actor.settings.timings.heartbeat_s)
            lasted_s = self.stalled_for_s()
            if lasted_s is not None:
                raise EngineError(f"The engine has been in one step for {lasted_s:.0f} s.")

    # ------------------------------------------------------------ others

    def bus_event(self, event: BusEvent) -> None:
        """See `Behaviour`: nothing is computed into the void."""
        match event:
            case Disconnected():
                self._engine.pause(True)
            case Reconnected():
                self._flush()  # who makes text is left out until it is heard again
                self._engine.pause(False)
                self._orphans.poke()
            case Overflow():
                self._orphans.poke()
            case PermissionRefused():
                pass
            case _:
                assert_never(event)

    def peer_changed(self, change: PeerChange) -> None:
        """See `Behaviour`."""
        self._orphans.peer_changed(change)
        if change.peer.kind != DETOKENIZER:
            return
        match change.news:
            case PeerNews.GONE:
                self._outbound.lose(change.peer.instance, "it has ended or is silent")
            case PeerNews.READY | PeerNews.RECOVERED:
                for held in self._outbound.send_backlogs():
                    self._remove(held, finished=True)
            case PeerNews.UPDATED | PeerNews.DRAINING | PeerNews.SUSPECT:
                return
            case _:
                assert_never(change.news)
        self._flush()

    # ------------------------------------------------------------ control

    async def control(self, verb: str, question: bytes) -> bytes:
        """Answers `probe` and `reset_cache`."""
        match verb:
            case "probe":
                known = {uid: it for uid in probe_decoder.decode(question).uids if (it := self._table.probed(uid))}
                return encode_json(ProbeAnswer(self._actor.instance, known))
            case "reset_cache":
                return encode_json({"freed_pages": await self._engine.reset_cache()})
            case _:
                raise InvalidRequest(f"A scheduler knows no control verb {verb!r}.")
