"""One message or one question that goes wrong is answered, and the actor goes on; what breaks the actor ends it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest
from structlog.testing import capture_logs

from busllm.actors.actor import Actor
from busllm.actors.clock import Timings
from busllm.actors.supervisor import ActorPlan, Supervisor
from busllm.bus.memory import MemoryBus, MemoryConnection
from busllm.bus.protocol import ConnectionClosed
from busllm.errors import EngineError, IntegrityError, RemoteError, StageMissing, Superseded
from busllm.messages.codec import encode
from busllm.messages.control import raise_if_error
from busllm.testing.clock import ManualClock, settle
from busllm.testing.faulty_bus import FaultyBus
from tests.actors.recording import SUBJECTS, Recording, announcements, listening, make_actor

pytestmark = pytest.mark.anyio

BUG = ZeroDivisionError("a bug that one message meets")
BROKEN = (EngineError("broken"), IntegrityError("broken"), Superseded("another one lives"))


class Asker:
    """Somebody who sends messages and questions to one actor."""

    def __init__(self, behaviour: Recording, connection: MemoryConnection) -> None:
        self._behaviour = behaviour
        self.connection = connection

    @property
    def work(self) -> str:
        return SUBJECTS.tokenize(self._behaviour.actor.instance, "uid")

    async def tell(self, number: int) -> None:
        """Sends work and raises what comes back as an error."""
        raise_if_error(await self.connection.request(self.work, encode(number), timeout_s=5.0))

    async def ask(self, verb: str, question: bytes = b"") -> bytes:
        subject = SUBJECTS.control(self._behaviour.actor.instance, verb)
        answer = await self.connection.request(subject, question, timeout_s=5.0)
        raise_if_error(answer)
        return answer


@pytest.fixture
def behaviour() -> Recording:
    behaviour = Recording()
    behaviour.may_start.set()
    return behaviour


@pytest.fixture
async def asker(behaviour: Recording) -> AsyncIterator[Asker]:
    bus = MemoryBus(max_payload_bytes=4096)
    actor = make_actor(behaviour, bus, ManualClock())
    connection = await bus.connect(name="asker", inbox="inbox.asker")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        await actor.ready.wait()
        yield Asker(behaviour, connection)
        tasks.cancel_scope.cancel()


async def test_a_message_that_meets_a_bug_is_answered_and_the_next_one_is_taken(
    asker: Asker, behaviour: Recording
) -> None:
    behaviour.faults[13] = BUG
    with capture_logs() as logs, pytest.raises(RemoteError) as answered:
        await asker.tell(13)
    assert (answered.value.code, answered.value.status) == ("internal_error", 500)
    assert "a bug" not in answered.value.message, "others learn nothing of the inside"
    (line,) = [line for line in logs if line["event"] == "message_failed"]
    assert (line["subject"], line["exc_info"]) == (asker.work, True)
    asker.connection.publish(asker.work, encode(13))  # without a reply subject too
    asker.connection.publish(asker.work, encode(14))
    await settle()
    assert behaviour.numbers == [14]


async def test_a_message_that_fails_for_a_reason_is_answered_with_it(asker: Asker, behaviour: Recording) -> None:
    behaviour.faults[13] = StageMissing("scheduler", "it restarts")
    with pytest.raises(RemoteError, match="it restarts") as answered:
        await asker.tell(13)
    assert answered.value.code == StageMissing.code


async def test_a_question_that_meets_a_bug_is_answered_and_the_next_one_too(asker: Asker, behaviour: Recording) -> None:
    behaviour.faults["probe"] = BUG
    with capture_logs() as logs, pytest.raises(RemoteError) as answered:
        await asker.ask("probe")
    assert answered.value.code == "internal_error"
    assert [line["event"] for line in logs] == ["message_failed"]
    assert await asker.ask("echo", b"still here") == b"still here"


async def test_an_answer_that_the_bus_does_not_carry_becomes_an_error_with_the_numbers(
    asker: Asker, behaviour: Recording
) -> None:
    assert len(await asker.ask("echo", b"x" * 4096)) == 4096
    for number in range(100):
        behaviour.actor.trace.record("u" * 20, "delta", number=number)
    with pytest.raises(RemoteError, match="the bus carries 4096 bytes") as answered:
        await asker.ask("traces")
    assert (answered.value.status, answered.value.code) == (413, "answer_too_large")


async def test_a_reply_subject_that_is_none_harms_nobody(asker: Asker, behaviour: Recording) -> None:
    """A stock client may name any words as reply subject."""
    for reply in ("a..b", "a.*", "two words"):
        asker.connection.send(asker.work, b"\xc1nonsense", reply)
        asker.connection.send(SUBJECTS.control(behaviour.actor.instance, "echo"), b"hello", reply)
    await settle()
    assert await asker.ask("echo", b"still here") == b"still here"


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("way", ["message", "question"])
async def test_an_actor_that_is_broken_itself_ends(behaviour: Recording, error: Exception, way: str) -> None:
    behaviour.faults = {13: error, "probe": error}
    bus = MemoryBus()
    actor = make_actor(behaviour, bus, ManualClock())
    connection = await bus.connect(name="asker", inbox="inbox.asker")
    with anyio.fail_after(5), pytest.raises(ExceptionGroup) as raised:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.run)
            await actor.ready.wait()
            if way == "message":
                connection.publish(SUBJECTS.tokenize(actor.instance, "uid"), encode(13))
            else:
                connection.publish(SUBJECTS.control(actor.instance, "probe"), b"")
            await anyio.sleep_forever()
    assert raised.value.subgroup(type(error)) is not None


async def test_an_actor_whose_connection_is_given_up_ends_with_it(behaviour: Recording) -> None:
    bus = FaultyBus()
    actor = make_actor(behaviour, bus, ManualClock())
    with anyio.fail_after(5), pytest.raises(ExceptionGroup) as raised:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.run)
            await actor.ready.wait()
            bus.give_up()
            await anyio.sleep_forever()
    assert raised.value.subgroup(ConnectionClosed) is not None


async def test_a_stateless_actor_whose_connection_was_given_up_comes_back_under_a_new_name() -> None:
    bus, clock, stop, timings = FaultyBus(), ManualClock(), anyio.Event(), Timings()
    made: list[Recording] = []

    def make() -> Actor:
        behaviour = Recording()
        behaviour.may_start.set()
        behaviour.may_end.set()
        made.append(behaviour)
        return make_actor(behaviour, bus, clock)

    supervisor = Supervisor((ActorPlan("tokenizer:0", make, restarts_in_place=True),), clock, timings)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run, stop)
        await settle()
        bus.give_up()
        await settle()
        async with listening(bus, SUBJECTS.stage("*", "*")) as listener:
            await clock.advance(timings.restart_backoff_max_s)
            heard = {one.instance for one in await announcements(listener)}
        first, second = (behaviour.actor.instance for behaviour in made)
        assert heard == {second} != {first}
        stop.set()
