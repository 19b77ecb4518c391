"""The tokenizer: text in, token ids out, and on to a scheduler.

Owns: the chat template, encoding (in a thread, all waiting requests in one batch), the length check, the refusal of
grammars that do not compile, the choice of the scheduler replica.
Does not know: what becomes of a request after it was handed on. Pure: any tokenizer, twice if need be.
Next on the path: `stages/scheduler/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from busllm.actors.actor import Actor
from busllm.actors.behaviour import MessageHandler
from busllm.actors.directory import PeerChange, PeerNews
from busllm.bus.protocol import BusEvent, Message
from busllm.errors import BusllmError, ContextLengthExceeded, InvalidRequest
from busllm.grammar.compiler import GrammarCompiler
from busllm.messages.codec import encode, encode_json, pack_ids, unpack_ids
from busllm.messages.control import ProbeAnswer, ProbedSequence, probe_decoder
from busllm.messages.parts import Joiner, Part
from busllm.messages.to_everyone import decode_abort
from busllm.messages.to_frontend import Taken, Tokenized, failed
from busllm.messages.to_scheduler import ChoiceStart, Generate
from busllm.messages.to_tokenizer import ChatPrompt, Prompt, TextPrompt, Tokenize, TokenPrompt, decoder
from busllm.requests.routing import pick
from busllm.requests.tombstones import Tombstones
from busllm.text.tokenizer import Tokenizer
from busllm.text.vocabulary import vocabulary_of

T = TypeVar("T")


class TokenizeQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """Question of `control.<tokenizer>.tokenize`: `prompt` with `add_special_tokens`, or `messages` with
    `template_options` (as in `ChatPrompt`)."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    template_options: dict[str, Any] = {}


class DetokenizeQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """Question of `control.<tokenizer>.detokenize`."""

    token_ids: list[int]
    skip_special_tokens: bool = False


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
        self._load = load
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size
        self._grammars = GrammarCompiler(lambda: vocabulary_of(self._tokenizer, vocab_size, eos_token_ids))
        self._waiting: dict[str, Tokenize] = {}
        self._work = anyio.Event()
        self._tombstones = Tombstones()
        self._joiner = Joiner()
        self._num_done = 0
        self._idle = anyio.Event()

    async def start(self, actor: Actor) -> None:
        """See `Behaviour`."""
        self._actor = actor
        actor.report_progress("loading the tokenizer")
        self._tokenizer = await anyio.to_thread.run_sync(self._load)
        actor.tasks.start_soon(self._work_loop)

    def inboxes(self) -> Mapping[str, MessageHandler]:
        """See `Behaviour`."""
        subjects = self._actor.subjects
        return {
            subjects.tokenize(self._actor.instance, "*"): self._tokenize_arrived,
            subjects.abort("*"): self._abort_arrived,
        }

    def received_all(self) -> None:
        """See `Behaviour`: wakes the worker once for all that arrived."""
        if self._waiting:
            self._work.set()

    def bus_event(self, event: BusEvent) -> None:
        """See `Behaviour`: whatever is lost, its owner asks for."""

    def peer_changed(self, change: PeerChange) -> None:
        """See `Behaviour`: requests of an owner that is gone are dropped."""
        if change.news is PeerNews.GONE:
            for uid in [uid for uid, request in self._waiting.items() if request.frontend == change.peer.instance]:
                del self._waiting[uid]

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

    def _abort_arrived(self, message: Message) -> None:
        uid, attempt = message.subject.rpartition(".")[2], decode_abort(message.payload)
        self._tombstones.bury(uid, attempt)
        request = self._waiting.get(uid)
        if request is not None and self._tombstones.covers(uid, request.attempt):
            del self._waiting[uid]
            self._actor.trace.record(uid, "aborted")

    def _reply(self, request: Tokenize, reply: Any) -> None:
        self._actor.try_publish(self._actor.subjects.reply(request.frontend, request.uid), encode(reply))

    # ------------------------------------------------------------ work

    async def _work_loop(self) -> None:
        while True:
            await self._work.wait()
            self._work = anyio.Event()
            batch = list(self._waiting.values())
            if batch:
                outcomes = await anyio.to_thread.run_sync(self._encode_all, batch)
                for request, outcome in zip(batch, outcomes, strict=True):
                    self._hand_on(request, outcome)
            if not self._waiting:
                self._idle.set()
            else:
                self._work.set()

    def _encode_all(self, batch: list[Tokenize]) -> list[tuple[bytes, ...] | BusllmError]:
        """Encodes every prompt of every request; one failure is one request's own."""
        outcomes: list[tuple[bytes, ...] | BusllmError] = []
        for request in batch:
            try:
                if request.params.grammar is not None:
                    self._grammars.matcher(request.params.grammar)
                outcomes.append(tuple(pack_ids(ids) for ids in self._encode(request.prompts)))
            except BusllmError as error:
                outcomes.append(error)
        return outcomes

    def _encode(self, prompts: tuple[Prompt, ...]) -> list[np.ndarray]:
        encoded: list[np.ndarray] = []
        for prompt in prompts:
            match prompt:
                case ChatPrompt():
                    ids = self._tokenizer.encode_chat(prompt.messages, tools=prompt.tools, **prompt.template_options)
                    param = "messages"
                case TextPrompt():
                    ids = self._tokenizer.encode_batch([prompt.text], add_special_tokens=True)[0]
                    param = "prompt"
                case TokenPrompt():
                    ids = unpack_ids(prompt.token_ids).tolist()
                    param = "prompt"
            encoded.append(self._checked(np.asarray(ids, dtype=np.int32), param))
        return encoded

    def _checked(self, ids: np.ndarray, param: str) -> np.ndarray:
        if not len(ids):
            raise InvalidRequest(f"{param} is empty: there is no token to begin with.", param=param)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise InvalidRequest(f"{param} has token ids outside 0 to {self._vocab_size - 1}.", param=param)
        if len(ids) >= self._max_context_tokens:
            raise ContextLengthExceeded(len(ids), self._max_context_tokens, param)
        return ids

    def _hand_on(self, request: Tokenize, outcome: tuple[bytes, ...] | BusllmError) -> None:
        if self._waiting.get(request.uid) is not request:
            return  # aborted, or a higher attempt came meanwhile
        del self._waiting[request.uid]
        self._num_done += 1
        actor = self._actor
        if isinstance(outcome, BusllmError):
            actor.trace.record(request.uid, "failed", code=outcome.code)
            self._reply(request, failed(request.uid, request.attempt, self.kind, outcome))
            return
        peer = pick(actor.directory.usable("scheduler", request.avoid), {})
        scheduler = peer.instance if peer is not None else ""
        actor.trace.record(request.uid, "tokenized", prompt_tokens=sum(map(len, outcome)) // 4, scheduler=scheduler)
        self._reply(request, Tokenized(request.uid, request.attempt, outcome, scheduler))
        if not scheduler:
            return
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

    # ------------------------------------------------------------ control

    async def control(self, verb: str, question: bytes) -> bytes:
        """Answers `probe`, `tokenize` and `detokenize`."""
        match verb:
            case "probe":
                return self._probe(question)
            case "tokenize":
                asked = _decode(question, TokenizeQuestion)
                ids = await anyio.to_thread.run_sync(self._tokenize_text, asked)
                return encode_json({"token_ids": ids})
            case "detokenize":
                to_text = _decode(question, DetokenizeQuestion)
                self._checked_ids(to_text.token_ids)
                text = self._tokenizer.decode(to_text.token_ids, skip_special_tokens=to_text.skip_special_tokens)
                return encode_json({"text": text})
            case _:
                raise InvalidRequest(f"A tokenizer knows no control verb {verb!r}.")

    def _tokenize_text(self, asked: TokenizeQuestion) -> list[int]:
        if asked.messages is not None:
            return self._tokenizer.encode_chat(asked.messages, **asked.template_options)
        return self._tokenizer.encode_batch([asked.prompt or ""], add_special_tokens=asked.add_special_tokens)[0]

    def _checked_ids(self, token_ids: list[int]) -> None:
        if any(not 0 <= token_id < self._vocab_size for token_id in token_ids):
            raise InvalidRequest(f"tokens has ids outside 0 to {self._vocab_size - 1}.", param="tokens")

    def _probe(self, question: bytes) -> bytes:
        sequences: dict[str, tuple[ProbedSequence, ...]] = {
            uid: (ProbedSequence(0, self._waiting[uid].attempt, "running", 0),)
            for uid in probe_decoder.decode(question).uids
            if uid in self._waiting
        }
        return encode_json(ProbeAnswer(self._actor.instance, sequences))


def _decode(question: bytes, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(question, type=type_)
    except msgspec.DecodeError as error:
        raise InvalidRequest(str(error)) from error
