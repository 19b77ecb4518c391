"""`busllm.Client`: a program on the bus that asks for text without HTTP, watches requests and ends them.

Owns: the life of one client on the bus, which announces itself as a frontend does; prompts in the forms that Python
has; the questions to all stages at once.
Does not know: HTTP, how a request lives (`requests/owner.py`), what is printed (`cli/`).
Next on the path: `requests/owner.py`, then `stages/tokenizer.py`.

    async with busllm.Client("nats://token@127.0.0.1:4222") as client:
        async for delta in client.generate("Once upon a time", busllm.SamplingParams(max_tokens=40)):
            print(delta.text, end="")
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc
import msgspec

from busllm.actors.actor import Actor
from busllm.actors.clock import SystemClock, Timings
from busllm.actors.directory import PeerHealth
from busllm.actors.settings import ActorSettings
from busllm.actors.trace_feed import Traces, arriving_events, collect_traces
from busllm.bus.connect import BusOptions, open_bus
from busllm.bus.protocol import Bus
from busllm.errors import BusllmError, BusUnavailable, InvalidRequest
from busllm.ids import is_uid
from busllm.messages.control import Announcement
from busllm.messages.to_everyone import encode_abort
from busllm.requests.answer import Answer, Generation
from busllm.requests.generation import GenerationRequest
from busllm.requests.owner import RequestOwner
from busllm.requests.owner_behaviour import OwnerBehaviour
from busllm.requests.prompt_forms import LARGEST_TOKEN_ID, PromptLike, as_prompt
from busllm.requests.whereabouts import Holders, find_holders, state_in
from busllm.sampling import SamplingParams, check_sampling
from busllm.telemetry.logging import route_to_standard_logging
from busllm.telemetry.trace import TraceEvent, TraceLevel

MAX_CHOICES = 128
MAX_OPEN_REQUESTS = 10_000
LISTEN_HEARTBEATS = 1.2  # everybody announces themselves once per heartbeat; the rest is for a late one


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a client behaves.

    Attributes:
        connect_wait_s: how long the bus may take to be reached at the beginning.
        answer_wait_s: how long a stage may take to answer a question that is put to all stages.
        trace_level: how much it tells of its own requests.
        timings: of the life of its requests.
    """

    connect_wait_s: float = 10.0
    answer_wait_s: float = 2.0
    trace_level: TraceLevel = TraceLevel.REQUESTS
    timings: Timings = Timings()


class Client:
    """One client of a cluster, to be used as an asynchronous context manager.

    Args:
        bus: URL of the NATS server with its secret (`busllm env` prints it), or any `Bus`.
        cluster: second token of every subject.
        options: see `ClientOptions`.
    """

    def __init__(self, bus: str | Bus, *, cluster: str = "local", options: ClientOptions | None = None) -> None:
        route_to_standard_logging()
        self._bus = open_bus("nats", BusOptions(url=bus)) if isinstance(bus, str) else bus
        self._options = options = options or ClientOptions()
        self._owner = RequestOwner(MAX_OPEN_REQUESTS)
        # Whoever leaves waits for nothing: what is open is aborted.
        timings = msgspec.structs.replace(options.timings, drain_timeout_s=0.0)
        settings = ActorSettings(
            cluster=cluster, host=socket.gethostname(), timings=timings, trace_level=options.trace_level
        )
        behaviour = OwnerBehaviour("client", self._owner, is_unique=False)
        self._actor = Actor(behaviour, 0, self._bus, settings, SystemClock())
        self._tasks: anyio.abc.TaskGroup | None = None
        self._failure: BaseException | None = None
        self._heard_all_at = 0.0
        self._num_follows = 0

    @property
    def instance(self) -> str:
        """This client's name on the bus."""
        return self._actor.instance

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        """Connects.

        Raises:
            BusUnavailable: the bus was not reached in time.
            BusPermissionDenied: the server refuses the credentials.
        """
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            self._tasks.start_soon(self._run)
            with anyio.move_on_after(self._options.connect_wait_s):
                await self._actor.ready.wait()
            if not self._actor.ready.is_set():
                wait_s = self._options.connect_wait_s
                raise BusUnavailable(f"The bus at {self._bus.address} was not reached within {wait_s:g} s.")
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        timings = self._options.timings
        self._heard_all_at = self._actor.clock.monotonic() + LISTEN_HEARTBEATS * timings.heartbeat_s
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Aborts what is open and leaves the bus.

        Raises:
            BusllmError: what ended the client before.
        """
        assert self._tasks is not None
        self._actor.stop()
        is_cancelled = isinstance(error, anyio.get_cancelled_exc_class())
        # The task group is told of cancellation alone: it would wrap any other error of the block into a group.
        swallowed = bool(await self._tasks.__aexit__(*((kind, error, trace) if is_cancelled else (None, None, None))))
        if self._failure is not None:
            raise self._failure
        return swallowed

    async def _run(self) -> None:
        try:
            await self._actor.run()
        except BaseExceptionGroup as group:
            self._failure = _only_error(group)
            assert self._tasks is not None
            self._tasks.cancel_scope.cancel()

    # ------------------------------------------------------------ requests

    def generate(self, prompt: PromptLike, params: SamplingParams | None = None, *, n: int = 1) -> Generation:
        """Sends a request on its way.

        Args:
            prompt: a text, token ids, or the messages of a conversation (`[{"role": "user", "content": "…"}]`).
            params: sampling settings.
            n: how many answers.

        Returns:
            An asynchronous iterator of `ChoiceDelta`, with the request's `uid`.

        Raises:
            InvalidRequest: the prompt or a setting is wrong; what only the model can tell comes with the first delta.
            Unavailable: the bus is away, or too many requests are open.
        """
        params = params or SamplingParams()
        check_sampling(params, LARGEST_TOKEN_ID)
        if not 1 <= n <= MAX_CHOICES:
            raise InvalidRequest(f"n is {n}; it must be between 1 and {MAX_CHOICES}.", param="n")
        return Generation(self._owner.submit(GenerationRequest((as_prompt(prompt),), params, n=n)), self._owner.abort)

    async def complete(self, prompt: PromptLike, params: SamplingParams | None = None) -> Answer:
        """The whole answer to one prompt; see `generate`."""
        return await self.generate(prompt, params).whole()

    async def abort(self, uid: str, attempt: int | None = None) -> None:
        """Ends a request, whoever owns it; unknown and ended ones are ignored. Returns when the bus server has it.

        Args:
            attempt: ends this attempt and earlier ones only; None = the whole request.

        Raises:
            InvalidRequest: `uid` is no uid.
            BusDown: the bus is away.
        """
        self._actor.publish(self._actor.subjects.abort(_checked(uid)), encode_abort(attempt))
        await self._actor.connection.flush()

    # ------------------------------------------------------------ watching

    async def stages(self) -> list[Announcement]:
        """What everybody else on the bus announced last; right after the start it waits for one round of heartbeats."""
        await self._actor.clock.sleep(max(0.0, self._heard_all_at - self._actor.clock.monotonic()))
        return [announced for announced in self._owner.peers() if announced.instance != self.instance]

    def is_silent(self, instance: str) -> bool:
        """Whether an instance has missed its heartbeats."""
        peer = self._actor.directory.get(instance)
        return peer is None or peer.health is not PeerHealth.ALIVE

    async def trace(self, uid: str) -> Traces:
        """The events of one request, from every instance that remembers it.

        Raises:
            InvalidRequest: `uid` is no uid.
        """
        own = self._actor.trace.events_of(_checked(uid))
        return await self._with_remembered(own, {"uid": uid})

    async def latest_traces(self, limit: int = 20) -> Traces:
        """The events of the latest `limit` requests (at most 100) of every instance."""
        return await self._with_remembered(self._actor.trace.latest(limit), {"limit": limit})

    async def _with_remembered(self, own: list[TraceEvent], question: dict[str, Any]) -> Traces:
        wait_s = self._options.answer_wait_s
        others = await collect_traces(self._actor, await self.stages(), question, wait_s=wait_s)
        return Traces((*own, *others.events), others.silent)

    @asynccontextmanager
    async def follow_traces(self, uid: str | None = None) -> AsyncIterator[AsyncIterator[TraceEvent]]:
        """Follows events as they happen; the subscription is in force when the block begins.

        It has a connection of its own, so that reading slowly loses events (the log tells how many) and never replies.

            async with client.follow_traces() as events:
                async for event in events: ...

        Args:
            uid: only this request; None = all.

        Raises:
            InvalidRequest: `uid` is no uid.
        """
        pattern = self._actor.subjects.trace("*" if uid is None else _checked(uid), "*", "*")
        self._num_follows += 1
        name = f"follow-{self._num_follows}"
        inbox = f"{self._actor.subjects.inbox(self.instance)}.{name}"
        connection = await self._bus.connect(name=f"{self.instance}.{name}", inbox=inbox)
        try:
            await connection.subscribe(pattern)
            yield arriving_events(connection)
        finally:
            with anyio.CancelScope(shield=True):
                await connection.close()

    async def holders(self, uid: str) -> Holders:
        """Who has a request now: its owner and the stages that work on it or queue it.

        Raises:
            InvalidRequest: `uid` is no uid.
        """
        found = await find_holders(self._actor, await self.stages(), _checked(uid), wait_s=self._options.answer_wait_s)
        own = state_in(uid, self.instance, self._owner.live_answer())
        return found if own is None else Holders({self.instance: own} | found.states, found.silent)

    async def ask(self, kind: str, verb: str, question: Mapping[str, Any]) -> dict[str, Any]:
        """Asks a usable instance of a kind of stage, the least busy one, `control.<instance>.<verb>`.

        Raises:
            StageMissing: there is none.
            BusError, RemoteError: what the bus or the stage reports.
        """
        await self.stages()
        return await self._owner.ask(kind, verb, dict(question))


def _checked(uid: str) -> str:
    if not is_uid(uid):
        raise InvalidRequest(f"{uid!r} is no uid; a uid has 20 letters a to z and digits 2 to 7.", param="uid")
    return uid


def _only_error(group: BaseExceptionGroup) -> BaseException:
    """The error of busllm that a group consists of, or the group."""
    inner = [_only_error(one) if isinstance(one, BaseExceptionGroup) else one for one in group.exceptions]
    return inner[0] if all(isinstance(one, BusllmError) for one in inner) else group
