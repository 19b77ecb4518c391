"""The tokenizer: text in, token ids out, and on to a scheduler.

Owns: requests that wait to be encoded (in a thread, few at a time, so that a long prompt holds up no short one), and
the choice of the scheduler replica.
Does not know: how a prompt becomes ids (`prompt_encoder.py`), what becomes of a request after it was handed on. Pure:
any tokenizer, twice if need be.
Next on the path: `stages/scheduler/stage.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec

from busllm.actors.actor import Actor
from busllm.actors.behaviour import MessageHandler
from busllm.actors.directory import PeerChange, PeerNews
from busllm.bus.protocol import BusEvent, Message, Overflow, Reconnected
from busllm.errors import BusllmError, InvalidRequest
from busllm.grammar.compiler import GrammarCompiler
from busllm.messages.codec import encode, encode_json
from busllm.messages.control import ProbeAnswer, ProbedSequence, probe_decoder
from busllm.messages.parts import Joiner, Part
from busllm.messages.to_everyone import decode_abort
from busllm.messages.to_frontend import Taken, Tokenized, failed
from busllm.messages.to_scheduler import ChoiceStart, Generate
from busllm.messages.to_tokenizer import Tokenize, decoder
from busllm.requests.orphans import OrphanWatch
from busllm.requests.routing import pick
from busllm.requests.tombstones import Tombstones
from busllm.stages.prompt_encoder import DetokenizeQuestion, Outcome, PromptEncoder, TokenizeQuestion
from busllm.text.tokenizer import Tokenizer
from busllm.text.vocabulary import vocabulary_of

T = TypeVar("T")

MAX_THREADS = 2


class TokenizerStage:
    """Behaviour of a tokenizer actor.

    Args:
        load: the model's tokenizer, called in a thread.
        max_context_tokens, vocab_size: of the model.
        eos_token_ids: tokens that end a turn; without any, grammars are refused.
    """

    kind = "tokenizer"
    is_unique = True

    def __init__(
        self,
        load: Callable[[], Tokenizer],
        max_context_tokens: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._make_encoder = partial(_load_encoder, load, max_context_tokens, vocab_size, eos_token_ids)
        self._waiting: dict[str, Tokenize] = {}
        self._tombstones = Tombstones()
        self._joiner = Joiner()
        self._num_done = 0
        self._handed_on: Counter[str] = Counter()  # sequences by scheduler, since it last announced its load
        self._idle = anyio.Event()

    async def start(self, actor: Actor) -> None:
        """See `Behaviour`."""
        self._actor = actor
        self._orphans = OrphanWatch(actor, self._held_by_owner, self._drop)
        actor.report_progress("loading the tokenizer")
        self._encoder = await anyio.to_thread.run_sync(self._make_encoder)
        self._threads = anyio.CapacityLimiter(MAX_THREADS)
        actor.tasks.start_soon(self._orphans.run)

    def inboxes(self) -> Mapping[str, MessageHandler]:
        """See `Behaviour`."""
        subjects = self._actor.subjects
        return {
            subjects.tokenize(self._actor.instance, "*"): self._tokenize_arrived,
            subjects.abort("*"): self._abort_arrived,
        }

    def received_all(self) -> None:
        """See `Behaviour`: each request is encoded by a task of its own."""

    def bus_event(self, event: BusEvent) -> None:
        """See `Behaviour`: whatever is lost its owner asks for; an abort may be among it."""
        if isinstance(event, Reconnected | Overflow):
            self._orphans.poke()

    def peer_changed(self, change: PeerChange) -> None:
        """See `Behaviour`: requests of an owner that is gone are dropped."""
        self._orphans.peer_changed(change)
        if change.news is PeerNews.UPDATED:  # what was handed on before is in what it announces now
            self._handed_on.pop(change.peer.instance, None)

    def load(self) -> dict[str, float]:
        """See `Behaviour`."""
        return {"requests": float(len(self._waiting))}

    def statistics(self) -> dict[str, Any]:
        """See `Behaviour`."""
        return {"requests": len(self._waiting), "tokenized": self._num_done}

    async def drain(self) -> None:
        """See `Behaviour`: what waits is tokenized first."""
        while self._waiting:
            self._idle = anyio.Event()
            await self._idle.wait()

    # ------------------------------------------------------------ inbox

    def _tokenize_arrived(self, message: Message) -> None:
        request = decoder.decode(message.payload)
        if isinstance(request, Part):
            whole = self._joiner.add(request)
            request = decoder.decode(whole) if whole is not None else request
        if isinstance(request, Part) or self._tombstones.covers(request.uid, request.attempt):
            return
        known = self._waiting.get(request.uid)
        if known is not None and known.attempt >= request.attempt:
            return
        self._actor.trace.begin(request.uid)
        self._waiting[request.uid] = request
        self._reply(request, Taken(request.uid, request.attempt, self.kind, self._actor.instance))
        self._actor.tasks.start_soon(self._encode, request)

    def _abort_arrived(self, message: Message) -> None:
        uid, attempt = message.subject.rpartition(".")[2], decode_abort(message.payload)
        self._tombstones.bury(uid, attempt)
        self._drop(uid, attempt)

    def _drop(self, uid: str, attempt: int | None) -> None:
        request = self._waiting.get(uid)
        if request is not None and (attempt is None or request.attempt <= attempt):
            del self._waiting[uid]
            self._actor.trace.record(uid, "aborted")

    def _held_by_owner(self) -> dict[str, dict[str, int]]:
        held: dict[str, dict[str, int]] = defaultdict(dict)
        for uid, request in self._waiting.items():
            held[request.frontend][uid] = request.attempt
        return held

    def _reply(self, request: Tokenize, reply: Any) -> None:
        self._actor.try_publish(self._actor.subjects.reply(request.frontend, request.uid), encode(reply))

    # ------------------------------------------------------------ work

    async def _encode(self, request: Tokenize) -> None:
        if self._waiting.get(request.uid) is request:
            outcome = await anyio.to_thread.run_sync(self._encoder.encode, request, limiter=self._threads)
            self._hand_on(request, outcome)
        if not self._waiting:
            self._idle.set()

    def _hand_on(self, request: Tokenize, outcome: Outcome) -> None:
        if self._waiting.get(request.uid) is not request:
            return  # aborted, or a higher attempt came meanwhile
        del self._waiting[request.uid]
        self._num_done += 1
        actor = self._actor
        if isinstance(outcome, BusllmError):
            actor.trace.record(request.uid, "failed", code=outcome.code)
            self._reply(request, failed(request.uid, request.attempt, self.kind, outcome))
            return
        scheduler = self._choose_scheduler(request)
        actor.trace.record(request.uid, "tokenized", prompt_tokens=sum(map(len, outcome)) // 4, scheduler=scheduler)
        self._reply(request, Tokenized(request.uid, request.attempt, outcome, scheduler))
        if scheduler is None:
            return  # its owner keeps the ids, and sends them when there is one
        reply = actor.subjects.reply(request.frontend, request.uid)
        for number, prompt_ids in enumerate(outcome):
            first = number * request.n
            generate = Generate(
                uid=request.uid,
                attempt=request.attempt,
                frontend=request.frontend,
                prompt_ids=prompt_ids,
                choices=tuple(ChoiceStart(choice) for choice in range(first, first + request.n)),
                params=request.params,
                seed=request.seed,
                priority=request.priority,
                cache_namespace=request.cache_namespace,
                avoid=request.avoid,
            )
            actor.try_publish(actor.subjects.generate(scheduler, request.uid), encode(generate), reply)

    def _choose_scheduler(self, request: Tokenize) -> str | None:
        able = self._actor.directory.usable("scheduler", request.avoid)
        peer = pick(able, {one.instance: one.load + self._handed_on[one.instance] for one in able})
        if peer is None:
            return None
        self._handed_on[peer.instance] += len(request.prompts) * request.n
        return peer.instance

    # ------------------------------------------------------------ control

    async def control(self, verb: str, question: bytes) -> bytes:
        """Answers `probe`, `tokenize` and `detokenize`."""
        match verb:
            case "probe":
                return self._probe(question)
            case "tokenize":
                asked = _decode(question, TokenizeQuestion)
                ids = await anyio.to_thread.run_sync(self._encoder.answer_tokenize, asked)
                return encode_json({"token_ids": ids})
            case "detokenize":
                to_text = _decode(question, DetokenizeQuestion)
                return encode_json({"text": self._encoder.answer_detokenize(to_text)})
            case _:
                raise InvalidRequest(f"A tokenizer knows no control verb {verb!r}.")

    def _probe(self, question: bytes) -> bytes:
        sequences: dict[str, tuple[ProbedSequence, ...]] = {
            uid: (ProbedSequence(0, self._waiting[uid].attempt, "running", 0),)
            for uid in probe_decoder.decode(question).uids
            if uid in self._waiting
        }
        return encode_json(ProbeAnswer(self._actor.instance, sequences))


def _load_encoder(
    load: Callable[[], Tokenizer], max_context_tokens: int, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> PromptEncoder:
    tokenizer = load()
    grammars = GrammarCompiler(lambda: vocabulary_of(tokenizer, vocab_size, eos_token_ids))
    return PromptEncoder(tokenizer, grammars, max_context_tokens, vocab_size)


def _decode(question: bytes, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(question, type=type_)
    except msgspec.DecodeError as error:
        raise InvalidRequest(str(error)) from error
