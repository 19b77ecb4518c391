"""The scheduler's behaviour: sequences in, token batches out, the engine beside it.

Owns: what a sequence's owner, its detokenizer and the bus mean for the engine: taking over, adopting, aborting,
holding back, dropping orphans.
Does not know: whom the engine computes next (`engine/planner.py`), text.
Next on the path: `engine_thread.py` and `detokenizer_link.py`, then `stages/detokenizer/`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, assert_never

import anyio

from busllm.actors.actor import Actor
from busllm.actors.behaviour import MessageHandler
from busllm.actors.directory import PeerChange, PeerNews
from busllm.bus.protocol import BusEvent, Disconnected, Message, Overflow, PermissionRefused, Reconnected
from busllm.engine.engine import Engine
from busllm.engine.sequence import SequenceRequest, SequenceTokens, StepOutput
from busllm.errors import BusError, BusllmError, Draining, EngineError, InvalidRequest
from busllm.messages.codec import encode, encode_json, unpack_ids
from busllm.messages.control import ProbeAnswer, ProbedSequence, live_answer_decoder, probe_decoder
from busllm.messages.parts import Joiner, Part
from busllm.messages.to_everyone import decode_abort
from busllm.messages.to_frontend import Taken, failed
from busllm.messages.to_scheduler import Generate, StopMatched, decoder
from busllm.requests.routing import pick
from busllm.requests.tombstones import Tombstones
from busllm.sampling import choice_seed
from busllm.stages.scheduler.detokenizer_link import DetokenizerLink
from busllm.stages.scheduler.engine_thread import Crashed, EngineOutput, EngineThread, Refused
from busllm.stages.scheduler.held_sequence import HeldSequence

MAX_FINISHED = 10_000


class SchedulerStage:
    """Behaviour of rank 0."""

    kind = "scheduler"
    is_unique = True

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._engine = EngineThread(make_engine)
        self._held: dict[tuple[str, int], HeldSequence] = {}
        self._of_uid: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self._links: dict[str, DetokenizerLink] = {}
        self._finished: OrderedDict[str, dict[int, ProbedSequence]] = OrderedDict()
        self._tombstones = Tombstones()
        self._joiner = Joiner()
        self._holding: frozenset[tuple[str, int]] = frozenset()
        self._draining = False
        self._empty = anyio.Event()

    async def start(self, actor: Actor) -> None:
        """See `Behaviour`."""
        self._actor = actor
        actor.report_progress("loading the model")
        await self._engine.start()
        actor.tasks.start_soon(self._output_loop)
        actor.tasks.start_soon(self._stall_watch)

    def inboxes(self) -> Mapping[str, MessageHandler]:
        """See `Behaviour`."""
        subjects, instance = self._actor.subjects, self._actor.instance
        return {
            subjects.generate(instance, "*"): self._work_arrived,
            subjects.stop(instance): self._work_arrived,
            subjects.abort("*"): self._abort_arrived,
            f"{subjects.inbox(instance)}.batch.*": self._acknowledged,
        }

    def received_all(self) -> None:
        """See `Behaviour`."""
        self._flush()

    def load(self) -> dict[str, float]:
        """See `Behaviour`."""
        return {"requests": float(len(self._held))}

    def statistics(self) -> dict[str, Any]:
        """See `Behaviour`."""
        engine = self._engine.statistics
        counts: dict[str, Any] = {"sequences": len(self._held)}
        if engine is not None:
            counts |= {
                "running": engine.running,
                "waiting": engine.waiting,
                "kv_pages": {
                    "total": engine.pages_total,
                    "free": engine.pages_free,
                    "cached": engine.pages_cached,
                    "owned": engine.pages_owned,
                },
                "page_tokens": engine.page_tokens,
                "steps": engine.steps,
                "tokens": {
                    "prompt": engine.prompt_tokens,
                    "cached_prompt": engine.cached_prompt_tokens,
                    "output": engine.output_tokens,
                },
                "retractions": engine.retractions,
            }
        return counts

    async def drain(self) -> None:
        """See `Behaviour`: what runs may finish; what is left when time is up goes on elsewhere."""
        self._draining = True
        try:
            while self._held:
                self._empty = anyio.Event()
                await self._empty.wait()
        finally:
            for uid, keys in list(self._of_uid.items()):
                self._fail(self._held[next(iter(keys))].generate, Draining("The scheduler is shutting down."))
                self._drop(uid, None)
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
        taken = Taken(generate.uid, generate.attempt, self.kind, actor.instance)
        actor.try_publish(actor.subjects.reply(generate.frontend, generate.uid), encode(taken))
        prompt_ids = unpack_ids(generate.prompt_ids)
        for start in generate.choices:
            held = HeldSequence(generate, start)
            known = self._held.get(held.key)
            if known is not None and known.generate.attempt >= generate.attempt:
                continue
            self._held[held.key] = held
            self._of_uid[generate.uid].add(held.key)
            self._engine.submit(
                SequenceRequest(
                    uid=generate.uid,
                    choice=start.choice,
                    attempt=generate.attempt,
                    prompt_ids=prompt_ids,
                    output_ids=unpack_ids(start.output_ids),
                    params=generate.params,
                    seed=choice_seed(generate.seed, start.choice),
                    priority=generate.priority,
                    cache_namespace=generate.cache_namespace,
                )
            )
        self._update_hold()

    def _stop(self, uid: str, choice: int, attempt: int) -> None:
        held = self._held.get((uid, choice))
        if held is not None and held.generate.attempt == attempt:
            self._engine.stop(uid, choice, attempt)
            self._forget(held, "finished")

    def _abort_arrived(self, message: Message) -> None:
        uid, attempt = message.subject.rpartition(".")[2], decode_abort(message.payload)
        self._tombstones.bury(uid, attempt)
        self._drop(uid, attempt)

    def _drop(self, uid: str, attempt: int | None) -> None:
        """Ends sequences of a request up to an attempt (None: all), wherever they are in the engine."""
        keys = [key for key in self._of_uid.get(uid, ()) if attempt is None or self._attempt_of(key) <= attempt]
        if keys:
            self._engine.abort(uid, attempt)
            for key in keys:
                self._forget(self._held[key], None)

    def _attempt_of(self, key: tuple[str, int]) -> int:
        return self._held[key].generate.attempt

    def _fail(self, generate: Generate, error: BusllmError) -> None:
        message = failed(generate.uid, generate.attempt, self.kind, error)
        self._actor.try_publish(self._actor.subjects.reply(generate.frontend, generate.uid), encode(message))

    def _forget(self, held: HeldSequence, state: str | None) -> None:
        key = held.key
        del self._held[key]
        keys = self._of_uid[held.generate.uid]
        keys.discard(key)
        if not keys:
            del self._of_uid[held.generate.uid]
        if state is not None:
            ended = self._finished.setdefault(held.generate.uid, {})
            ended[held.start.choice] = ProbedSequence(held.start.choice, held.generate.attempt, state, held.next_index)
            if len(self._finished) > MAX_FINISHED:
                self._finished.popitem(last=False)
        if held.must_wait:
            self._update_hold()
        if not self._held:
            self._empty.set()

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
                    if event.name == "admitted":
                        self._note_admitted(event.uid, event.choice, int(event.data.get("cached_tokens", 0)))
                    self._actor.trace.record(event.uid, event.name, choice=event.choice, **event.data)
                for tokens in output.tokens:
                    self._take_tokens(tokens)
            case Refused():
                held = self._held.get((output.request.uid, output.request.choice))
                if held is not None and held.generate.attempt == output.request.attempt:
                    self._fail(held.generate, output.error)
                    self._actor.trace.record(output.request.uid, "failed", code=output.error.code)
                    self._drop(output.request.uid, output.request.attempt)
            case Crashed():
                raise output.error
            case _:
                assert_never(output)

    def _note_admitted(self, uid: str, choice: int, cached_tokens: int) -> None:
        held = self._held.get((uid, choice))
        if held is not None and not held.is_admitted:
            held.is_admitted, held.cached_tokens = True, cached_tokens

    def _take_tokens(self, tokens: SequenceTokens) -> None:
        held = self._held.get((tokens.uid, tokens.choice))
        if held is None or held.generate.attempt != tokens.attempt:
            return
        held.next_index = tokens.index + len(tokens.token_ids)
        if held.lost_detokenizer:
            return
        if held.detokenizer is None and not self._open(held):
            held.backlog.append(tokens)
            self._update_hold()
            return
        self._send(held, tokens)

    def _open(self, held: HeldSequence) -> bool:
        peer = pick(self._actor.directory.usable("detokenizer", held.generate.avoid), self._sequences_per_link())
        if peer is None:
            return False
        link = self._links.get(peer.instance)
        if link is None:
            link = self._links[peer.instance] = DetokenizerLink(self._actor.instance, peer.instance)
        link.open(held)
        return True

    def _sequences_per_link(self) -> dict[str, int]:
        if len(self._links) < 2:
            return {}
        counts: dict[str, int] = defaultdict(int)
        for held in self._held.values():
            if held.detokenizer is not None:
                counts[held.detokenizer] += 1
        return counts

    def _send(self, held: HeldSequence, tokens: SequenceTokens) -> None:
        assert held.detokenizer is not None
        self._links[held.detokenizer].add(held, tokens)
        if tokens.finish_reason is not None:
            self._forget(held, "finished")

    def _flush(self) -> None:
        actor = self._actor
        for link in self._links.values():
            batch = link.take_batch()
            if batch is not None:
                reply = f"{actor.subjects.inbox(actor.instance)}.batch.{link.detokenizer}"
                actor.try_publish(actor.subjects.detokenize(link.detokenizer), encode(batch), reply)
                if link.is_congested:
                    self._update_hold()

    def _acknowledged(self, message: Message) -> None:
        link = self._links.get(message.subject.rpartition(".")[2])
        if link is None:
            return
        if message.no_responders:
            self._actor.directory.doubt(link.detokenizer)
            self._lose_detokenizer(link.detokenizer)
            return
        was_congested = link.is_congested
        link.acknowledge(int(message.payload))
        if was_congested and not link.is_congested:
            self._update_hold()

    def _update_hold(self) -> None:
        """Tells the engine which sequences stay out of its steps."""
        congested = {name for name, link in self._links.items() if link.is_congested}
        holding = frozenset(key for key, held in self._held.items() if held.must_wait or held.detokenizer in congested)
        if holding != self._holding:
            self._holding = holding
            self._engine.hold(holding)

    # ------------------------------------------------------------ others

    def bus_event(self, event: BusEvent) -> None:
        """See `Behaviour`: nothing is computed into the void."""
        match event:
            case Disconnected():
                self._engine.pause(True)
            case Reconnected():
                for link in self._links.values():
                    link.assume_all_acknowledged()
                self._update_hold()
                self._actor.tasks.start_soon(self._resume)
            case Overflow() | PermissionRefused():
                pass
            case _:
                assert_never(event)

    async def _resume(self) -> None:
        """After a bus gap: asks every owner what it still waits for, drops the rest, goes on."""
        actor, timings = self._actor, self._actor.settings.timings
        with anyio.move_on_after(timings.settle_s):
            while not self._links_are_heard():
                await actor.clock.sleep(timings.tick_s)
        self._engine.pause(False)
        for frontend in {held.generate.frontend for held in self._held.values()}:
            await self._drop_orphans(frontend)

    def _links_are_heard(self) -> bool:
        peers = [self._actor.directory.get(name) for name in self._links]
        return all(peer.heard_since_gap for peer in peers if peer is not None)

    async def _drop_orphans(self, frontend: str) -> None:
        actor = self._actor
        try:
            payload = await actor.connection.request(
                actor.subjects.control(frontend, "live"), b"", timeout_s=actor.settings.timings.probe_timeout_s
            )
        except BusError as error:
            actor.log.info("owner_not_asked", frontend=frontend, reason=error.message)
            return  # when it stays silent the directory calls it gone
        live = dict(live_answer_decoder.decode(payload).live)
        for uid in [uid for uid, keys in self._of_uid.items() if self._owner_of(keys) == frontend]:
            if uid not in live:
                self._drop(uid, None)
            elif live[uid] > 1:
                self._drop(uid, live[uid] - 1)

    def _owner_of(self, keys: set[tuple[str, int]]) -> str:
        return self._held[next(iter(keys))].generate.frontend

    def peer_changed(self, change: PeerChange) -> None:
        """See `Behaviour`."""
        peer = change.peer
        if peer.kind == "detokenizer":
            match change.news:
                case PeerNews.GONE:
                    self._lose_detokenizer(peer.instance)
                case PeerNews.READY | PeerNews.RECOVERED:
                    self._send_backlogs()
                case PeerNews.UPDATED | PeerNews.DRAINING | PeerNews.SUSPECT:
                    pass
                case _:
                    assert_never(change.news)
        elif change.news is PeerNews.GONE:
            for uid in [uid for uid, keys in self._of_uid.items() if self._owner_of(keys) == peer.instance]:
                self._drop(uid, None)

    def _lose_detokenizer(self, instance: str) -> None:
        if self._links.pop(instance, None) is None:
            return
        for held in self._held.values():
            if held.detokenizer == instance:
                held.lost_detokenizer = True
        self._update_hold()

    def _send_backlogs(self) -> None:
        for held in [held for held in self._held.values() if held.backlog]:
            if not self._open(held):
                return
            backlog, held.backlog = held.backlog, []
            for tokens in backlog:
                self._send(held, tokens)
        self._flush()
        self._update_hold()

    async def _stall_watch(self) -> None:
        timings = self._actor.settings.timings
        while True:
            await self._actor.clock.sleep(timings.heartbeat_s)
            lasted = self._engine.stalled_for_s(timings.stall_base_s, timings.stall_factor)
            if lasted is not None:
                raise EngineError(f"The engine has been in one step for {lasted:.0f} s.")

    # ------------------------------------------------------------ control

    async def control(self, verb: str, question: bytes) -> bytes:
        """Answers `probe` and `reset_cache`."""
        match verb:
            case "probe":
                return self._probe(question)
            case "reset_cache":
                return encode_json({"freed_pages": await self._engine.reset_cache()})
            case _:
                raise InvalidRequest(f"A scheduler knows no control verb {verb!r}.")

    def _probe(self, question: bytes) -> bytes:
        sequences = {}
        for uid in probe_decoder.decode(question).uids:
            known = dict(self._finished.get(uid, {}))
            for key in self._of_uid.get(uid, ()):
                held = self._held[key]
                state = "running" if held.is_admitted else "waiting"
                attempt = held.generate.attempt
                known[held.start.choice] = ProbedSequence(held.start.choice, attempt, state, held.next_index)
            if known:
                sequences[uid] = tuple(known.values())
        return encode_json(ProbeAnswer(self._actor.instance, sequences))
