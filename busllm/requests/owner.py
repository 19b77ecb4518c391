"""The owner of requests: from first byte to last, exactly one end each.

Owns: the table of live requests; what replies mean for them; what news of peers and of the bus mean for them.
Does not know: HTTP. A frontend and `busllm.Client` are behaviours around an owner.
Next on the path: `stages/tokenizer.py`; back from `stages/detokenizer/stage.py`.

The client sees exactly one end per request: the owner takes the first terminal of the current attempt, ignores
everything else, and makes one itself when nobody can.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, assert_never

import anyio
import msgspec

from busllm.actors.actor import Actor
from busllm.actors.behaviour import MessageHandler
from busllm.actors.directory import PeerChange, PeerNews
from busllm.bus.protocol import BusEvent, Disconnected, Message, Overflow, PermissionRefused, Reconnected
from busllm.errors import Aborted, BusUnavailable, Draining, QueueFull, StageMissing
from busllm.ids import new_uid
from busllm.messages.codec import encode_json
from busllm.messages.control import Announcement, LiveAnswer, probe_decoder, raise_if_error
from busllm.messages.to_everyone import decode_abort
from busllm.requests.agenda import Agenda
from busllm.requests.generation import GenerationRequest
from busllm.requests.live import LiveRequest
from busllm.requests.replies import Replies
from busllm.requests.routing import pick
from busllm.requests.sending import Sender
from busllm.requests.watch import Watch
from busllm.sampling import MAX_SEED

STAGES_ON_THE_PATH = ("tokenizer", "scheduler", "detokenizer")
ASK_TIMEOUT_S = 30.0


class RequestOwner:
    """All requests of one frontend or client. Made before its actor runs, bound to it in `start`."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._lives: dict[str, LiveRequest] = {}
        self._textless: set[str] = set()  # uids of those whose first text is awaited
        self._draining = False
        self._idle = anyio.Event()
        self._bound: tuple[Actor, Sender, Watch, Replies] | None = None

    def start(self, actor: Actor) -> None:
        """Binds the owner to its actor and starts looking after requests."""
        agenda = Agenda()
        sender = Sender(actor, agenda)
        watch = Watch(actor, sender, agenda, self._lives, self._settle)
        self._bound = (actor, sender, watch, Replies(actor, sender, self._lives, self._textless, self._settle))
        actor.tasks.start_soon(self._tick_loop)

    @property
    def _actor(self) -> Actor:
        if self._bound is None:
            raise StageMissing("frontend", "it is starting")
        return self._bound[0]

    @property
    def _sender(self) -> Sender:
        assert self._bound is not None
        return self._bound[1]

    @property
    def _watch(self) -> Watch:
        assert self._bound is not None
        return self._bound[2]

    @property
    def _replies(self) -> Replies:
        assert self._bound is not None
        return self._bound[3]

    # ------------------------------------------------------------ for a frontend or client

    def submit(self, request: GenerationRequest) -> LiveRequest:
        """Takes a request and sends it on its way.

        Raises:
            QueueFull: `max_queued` requests wait for their first text.
            BusUnavailable: the bus is away.
            Draining: this owner is shutting down.
        """
        actor = self._actor
        if self._draining:
            raise Draining("This server is shutting down.")
        if len(self._textless) >= self._max_queued:
            raise QueueFull(len(self._textless), self._max_queued)
        if not actor.connection.is_connected:
            raise BusUnavailable("The bus is away.")
        seed = request.params.seed if request.params.seed is not None else secrets.randbelow(MAX_SEED)
        live = LiveRequest(new_uid(), request, seed, actor.clock.monotonic())
        self._lives[live.uid] = live
        self._textless.add(live.uid)
        actor.trace.record(live.uid, "received", prompts=len(request.prompts), n=request.n)
        self._sender.begin(live)
        return live

    def abort(self, uid: str) -> None:
        """The client left: ends the request everywhere. Unknown or ended uids are ignored."""
        live = self._lives.get(uid)
        if live is not None and not live.is_done:
            live.fail(Aborted("The client left."))
            self._sender.abort(live)
            self._settle(live)

    async def wait_until_idle(self) -> None:
        """Waits until no request is open; a cancelled wait ends those that still are with `Draining`."""
        try:
            while self._lives:
                self._idle = anyio.Event()
                await self._idle.wait()
        finally:
            for live in list(self._lives.values()):
                live.fail(Draining("This server is shutting down and the request did not finish in time."))
                self._sender.abort(live)
                self._settle(live)

    def begin_drain(self) -> None:
        """Takes nothing new from now on."""
        self._draining = True

    def unready_reason(self) -> str | None:
        """Why a request would not be served now; None when it would."""
        if self._bound is None:
            return "the frontend is starting: the bus was not reached yet"
        if self._draining:
            return "draining"
        actor = self._actor
        if not actor.connection.is_connected:
            return "the bus is away"
        for kind in STAGES_ON_THE_PATH:
            reason = actor.directory.why_unusable(kind)
            if reason is not None:
                return f"{kind}: {reason}"
        return None

    async def ask(self, kind: str, verb: str, question: dict[str, Any]) -> dict[str, Any]:
        """Asks a control verb of a usable instance of a kind.

        Raises:
            StageMissing: there is none.
            BusError, RemoteError: what the bus or the stage reports.
        """
        actor = self._actor
        peer = pick(actor.directory.usable(kind), {})
        if peer is None:
            raise StageMissing(kind, actor.directory.why_unusable(kind) or "no instance is ready")
        subject = actor.subjects.control(peer.instance, verb)
        payload = await actor.connection.request(subject, encode_json(question), timeout_s=ASK_TIMEOUT_S)
        raise_if_error(payload)
        answer: dict[str, Any] = msgspec.json.decode(payload, type=dict[str, Any])
        return answer

    def peers(self) -> list[Announcement]:
        """What every instance announced last, this one included; nothing before the bus was reached."""
        if self._bound is None:
            return []
        return [self._actor.announcement(), *(peer.announcement for peer in self._actor.directory.peers())]

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._lives)

    @property
    def num_open_sequences(self) -> int:
        """Choices of these that have not ended."""
        return sum(live.num_unfinished for live in self._lives.values())

    # ------------------------------------------------------------ for the behaviour around it

    def inboxes(self) -> Mapping[str, MessageHandler]:
        """See `Behaviour.inboxes`."""
        actor = self._actor
        return {
            actor.subjects.reply(actor.instance, "*"): self._replies.arrived,
            actor.subjects.abort("*"): self._abort_arrived,
        }

    def live_answer(self, question: bytes = b"") -> bytes:
        """Answer to "which of these requests do you still wait for?"; an empty question asks about all.

        Raises:
            MalformedMessage: the question is none.
        """
        uids = probe_decoder.decode(question).uids if question else tuple(self._lives)
        live = tuple((uid, self._lives[uid].attempt) for uid in uids if uid in self._lives)
        return encode_json(LiveAnswer(self._actor.instance, live))

    def bus_event(self, event: BusEvent) -> None:
        """See `Behaviour.bus_event`."""
        match event:
            case Reconnected():
                self._watch.bus_is_back(self._actor.clock.monotonic())
            case Overflow():
                self._watch.ask_about_all()
            case Disconnected() | PermissionRefused():
                pass
            case _:
                assert_never(event)

    def peer_changed(self, change: PeerChange) -> None:
        """See `Behaviour.peer_changed`: requests of a lost holder go on at once."""
        instance = change.peer.instance
        match change.news:
            case PeerNews.GONE | PeerNews.SUSPECT:
                gone = change.news is PeerNews.GONE
                if gone or self._actor.directory.usable(change.peer.kind):
                    for live in [live for live in self._lives.values() if instance in live.holders()]:
                        self._sender.send_on(
                            live, f"{instance} is {change.news.value}", avoid=instance, holder_died=gone
                        )
                        self._settle(live)
            case PeerNews.READY | PeerNews.RECOVERED:
                for live in [live for live in self._lives.values() if live.waits_for is not None]:
                    self._sender.dispatch(live)
            case PeerNews.UPDATED | PeerNews.DRAINING:
                pass
            case _:
                assert_never(change.news)

    # ------------------------------------------------------------ ends

    async def _tick_loop(self) -> None:
        actor = self._actor
        while True:
            await actor.clock.sleep(actor.settings.timings.tick_s)
            self._watch.tick()

    def _abort_arrived(self, message: Message) -> None:
        live = self._lives.get(message.subject.rpartition(".")[2])
        attempt = decode_abort(message.payload)
        if live is not None and (attempt is None or attempt >= live.attempt):
            live.fail(Aborted("The request was aborted on the bus."))
            self._settle(live)

    def _settle(self, live: LiveRequest) -> None:
        """Takes an ended request off the table and tells its end."""
        if not live.is_done or self._lives.pop(live.uid, None) is None:
            return
        self._textless.discard(live.uid)
        self._sender.forget(live)
        if not self._lives:
            self._idle.set()
        error = live.error
        if error is None:
            tokens = sum(len(choice.output_ids) for choice in live.choices)
            self._actor.trace.record(live.uid, "finished", completion_tokens=tokens, attempts=live.attempt)
        elif isinstance(error, Aborted):
            self._actor.trace.record(live.uid, "aborted", attempts=live.attempt)
        else:
            self._actor.trace.record(live.uid, "failed", code=error.code, attempts=live.attempt)
