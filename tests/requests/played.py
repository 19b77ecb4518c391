"""An owner of requests whose stages are played by the test, message by message, with a clock that stands still."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from busllm.bus.protocol import Message
from busllm.ids import parse_instance
from busllm.messages.codec import encode_json, pack_ids
from busllm.messages.control import ProbeAnswer, ProbedSequence, probe_decoder
from busllm.messages.to_frontend import Failed, StepText, Taken, Tokenized, Usage
from busllm.messages.to_scheduler import Generate
from busllm.messages.to_scheduler import decoder as to_scheduler
from busllm.messages.to_tokenizer import TextPrompt, Tokenize
from busllm.messages.to_tokenizer import decoder as to_tokenizer
from busllm.requests.generation import ChoiceDelta, GenerationRequest
from busllm.requests.live import LiveRequest
from busllm.requests.owner import RequestOwner
from busllm.requests.owner_behaviour import OwnerBehaviour
from busllm.sampling import SamplingParams
from tests.stages.wire import DETOKENIZER, SCHEDULER, SUBJECTS, Wire, running

TOKENIZER = "tokenizer-0-ttttttt2"
OTHER_SCHEDULER = "scheduler-1-sssssss2"
HEARTBEAT_S = 0.5

Known = tuple[int, int, str, int]  # choice, attempt, state, next index


class Stages:
    """Everything around one owner.

    Attributes:
        wire: what the owner says.
        owner: the one under test.
        present: instances that send heartbeats.
        knows: what each instance answers to a probe, by uid.
        probed: (instance, uid) of every probe so far.
    """

    def __init__(self, wire: Wire, owner: RequestOwner) -> None:
        self.wire = wire
        self.owner = owner
        self.present = [TOKENIZER, SCHEDULER, DETOKENIZER]
        self.knows: dict[str, dict[str, tuple[Known, ...]]] = {}
        self.probed: list[tuple[str, str]] = []

    async def announce(self) -> None:
        """A heartbeat of each."""
        for instance in self.present:
            await self.wire.announce(instance)

    async def pass_time(self, seconds: float) -> None:
        """Moves the clock; the stages that are present send heartbeats meanwhile."""
        while seconds > 0:
            await self.announce()
            await self.wire.clock.advance(min(seconds, HEARTBEAT_S))
            seconds -= HEARTBEAT_S
        await self.wire.settle()

    def answer_probe(self, message: Message) -> None:
        """Plays the answer of a stage."""
        instance = message.subject.split(".")[3]
        uids = probe_decoder.decode(message.payload).uids
        self.probed += [(instance, uid) for uid in uids]
        known = self.knows.get(instance, {})
        sequences = {uid: tuple(ProbedSequence(*one) for one in known[uid]) for uid in uids if uid in known}
        assert message.reply is not None
        self.wire.connection.publish(message.reply, encode_json(ProbeAnswer(instance, sequences)))

    # ------------------------------------------------------------ what the owner is told

    async def tell(self, live: LiveRequest, *replies: Any) -> None:
        """Publishes replies and lets the owner take them."""
        for reply in replies:
            self.wire.send(SUBJECTS.reply(self.wire.actor.instance, live.uid), reply)
        await self.wire.settle()

    async def until_running(self, live: LiveRequest, attempt: int = 1, scheduler: str = SCHEDULER) -> None:
        """Brings a request from its tokenizer to its scheduler."""
        await self.tell(
            live,
            Taken(live.uid, attempt, "tokenizer", TOKENIZER),
            Tokenized(live.uid, attempt, (pack_ids([1, 2, 3]),), scheduler),
            Taken(live.uid, attempt, "scheduler", scheduler),
        )

    async def text(self, live: LiveRequest, index: int, text: str, *, attempt: int = 1, choice: int = 0,
                   end: str | None = None) -> None:  # fmt: skip
        """A row of text; each character is a token."""
        finished = () if end is None else ((0, end, Usage(3, 0, index + len(text))),)
        batch = StepText(
            DETOKENIZER,
            (live.uid,),
            pack_ids([choice]),
            pack_ids([attempt]),
            pack_ids([index]),
            (text,),
            pack_ids([0, len(text)]),
            pack_ids([ord(character) for character in text]),
            finished,
        )
        self.wire.send(SUBJECTS.reply_step(self.wire.actor.instance), batch)
        await self.wire.settle()

    # ------------------------------------------------------------ what the owner said

    def tokenize(self, live: LiveRequest) -> list[Tokenize]:
        """Every message to a tokenizer about a request."""
        return [
            to_tokenizer.decode(message.payload)  # type: ignore[misc]
            for message in self.wire.said(SUBJECTS.all_of("tokenize"))
            if message.subject.endswith(live.uid)
        ]

    def generate(self, live: LiveRequest) -> list[tuple[str, Generate]]:
        """Every message to a scheduler about a request: (instance, message)."""
        return [
            (message.subject.split(".")[3], to_scheduler.decode(message.payload))  # type: ignore[misc]
            for message in self.wire.said(SUBJECTS.all_of("generate"))
            if message.subject.endswith(live.uid)
        ]

    def aborts(self, live: LiveRequest) -> list[bytes]:
        """Payloads of the aborts of a request."""
        return [message.payload for message in self.wire.said(SUBJECTS.abort(live.uid))]


def request(n: int = 1, prompts: int = 1) -> GenerationRequest:
    return GenerationRequest((TextPrompt("abc"),) * prompts, SamplingParams(seed=7, max_tokens=50), n=n)


def failed(live: LiveRequest, code: str, *, attempt: int = 1, retryable: bool, stage: str = "scheduler") -> Failed:
    return Failed(live.uid, attempt, stage, code, "why", "server_error", 503, retryable=retryable)


async def read(live: LiveRequest) -> list[ChoiceDelta]:
    """Everything of a request that has ended."""
    with anyio.fail_after(5):
        return [delta async for deltas in live for delta in deltas]


@asynccontextmanager
async def playing(max_queued: int = 100) -> AsyncIterator[Stages]:
    """Runs an owner; every stage is there."""
    owner = RequestOwner(max_queued)
    async with running(OwnerBehaviour("client", owner, is_unique=False)) as wire, anyio.create_task_group() as tasks:
        stages = Stages(wire, owner)
        await stages.announce()
        assert owner.unready_reason() is None
        assert parse_instance(wire.actor.instance)[0] == "client"
        tasks.start_soon(_answer_probes, stages)
        yield stages
        tasks.cancel_scope.cancel()


async def _answer_probes(stages: Stages) -> None:
    seen = 0
    while True:
        probes = [message for message in stages.wire.heard if message.subject.endswith(".probe")]
        for message in probes[seen:]:
            stages.answer_probe(message)
        seen = len(probes)
        await stages.wire.next_message()
