"""An actor's life as others hear it, and what it answers."""

from __future__ import annotations

import json

import anyio
import pytest

from busllm.actors.actor import Actor
from busllm.actors.clock import Timings
from busllm.actors.directory import PeerNews
from busllm.actors.settings import ActorSettings
from busllm.bus.memory import MemoryBus
from busllm.bus.protocol import Disconnected, Reconnected
from busllm.errors import NoResponders, RemoteError, Superseded
from busllm.messages.codec import encode, encode_json
from busllm.messages.control import Announcement, StageState, announcement_decoder, raise_if_error
from busllm.testing.clock import EPOCH_S, ManualClock, settle
from busllm.testing.faulty_bus import FaultyBus
from tests.actors.recording import SUBJECTS, Recording, announcements, listening, make_actor

pytestmark = pytest.mark.anyio

TIMINGS = Timings()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


async def test_it_announces_starting_ready_draining_and_gone(clock: ManualClock) -> None:
    bus, behaviour = MemoryBus(), Recording()
    actor = make_actor(behaviour, bus, clock)
    async with listening(bus, SUBJECTS.stage("*", "*")) as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        heard = await announcements(listener)
        assert {one.state for one in heard} == {StageState.STARTING}
        actor.report_progress("loading")
        assert [one.progress for one in await announcements(listener)] == ["loading"]
        behaviour.may_start.set()
        (ready,) = await announcements(listener)
        assert (ready.state, ready.progress, ready.instance) == (StageState.READY, "", actor.instance)
        actor.stop()
        assert [one.state for one in await announcements(listener)] == [StageState.DRAINING]
        behaviour.may_end.set()
        assert [one.state for one in await announcements(listener)] == [StageState.GONE]


async def test_it_speaks_every_heartbeat_and_when_it_is_asked(clock: ManualClock) -> None:
    bus, behaviour = MemoryBus(), Recording()
    behaviour.may_start.set()
    async with listening(bus, SUBJECTS.stage("*", "*")) as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(make_actor(behaviour, bus, clock).run)
        await announcements(listener)
        await clock.advance(4 * TIMINGS.heartbeat_s)
        assert len(await announcements(listener)) == 4
        listener.publish(SUBJECTS.discover(), b"")
        assert len(await announcements(listener)) == 1
        tasks.cancel_scope.cancel()


async def test_its_load_and_statistics_are_in_what_it_announces(clock: ManualClock) -> None:
    bus, behaviour = MemoryBus(), Recording()
    behaviour.may_start.set()
    async with listening(bus, SUBJECTS.stage("*", "*")) as listener, anyio.create_task_group() as tasks:
        actor = make_actor(behaviour, bus, clock)
        tasks.start_soon(actor.run)
        await announcements(listener)
        behaviour.num_wakeups = 0
        for number in range(3):
            listener.publish(SUBJECTS.tokenize(actor.instance, "uid"), encode(number))
        await settle()
        assert behaviour.numbers == [0, 1, 2]
        assert behaviour.num_wakeups == 1, "all that is ready is one wake-up"
        listener.publish(SUBJECTS.discover(), b"")
        (said,) = await announcements(listener)
        assert (said.load, said.statistics) == ({"requests": 3.0}, {"numbers": 3})
        tasks.cancel_scope.cancel()


async def test_work_before_ready_comes_back_to_its_sender(clock: ManualClock) -> None:
    bus, behaviour = MemoryBus(), Recording()
    actor = make_actor(behaviour, bus, clock)
    async with listening(bus, "unused") as sender, anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        await settle()
        with pytest.raises(NoResponders):
            await sender.request(SUBJECTS.tokenize(actor.instance, "uid"), encode(1), timeout_s=5.0)
        tasks.cancel_scope.cancel()


async def test_control_verbs_are_answered_whatever_they_are(clock: ManualClock) -> None:
    bus, behaviour = MemoryBus(), Recording()
    behaviour.may_start.set()
    behaviour.may_end.set()
    actor = make_actor(behaviour, bus, clock)
    async with listening(bus, "unused") as operator, anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        await actor.ready.wait()

        async def ask(verb: str, question: bytes) -> bytes:
            return await operator.request(SUBJECTS.control(actor.instance, verb), question, timeout_s=5.0)

        assert await ask("echo", b"hello") == b"hello"
        with pytest.raises(RemoteError, match="no verb 'nonsense'") as unknown:
            raise_if_error(await ask("nonsense", b""))
        assert unknown.value.status == 400
        with pytest.raises(RemoteError, match="traces"):
            raise_if_error(await ask("traces", b'{"limit": "many"}'))
        actor.trace.record("u" * 20, "received", prompts=1)
        for question in (b"", encode_json({"uid": "u" * 20}), encode_json({"limit": 1})):
            answer = json.loads(await ask("traces", question))
            assert answer["instance"] == actor.instance
            assert [(event["event"], event["data"]) for event in answer["events"]] == [("received", {"prompts": 1})]
        assert json.loads(await ask("traces", encode_json({"uid": "z" * 20})))["events"] == []
        assert await ask("drain", b"") == b"{}"


async def test_what_does_not_decode_is_answered_and_the_actor_goes_on(clock: ManualClock) -> None:
    bus, behaviour = MemoryBus(), Recording()
    behaviour.may_start.set()
    actor = make_actor(behaviour, bus, clock)
    async with listening(bus, "unused") as sender, anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        await actor.ready.wait()
        work = SUBJECTS.tokenize(actor.instance, "uid")
        with pytest.raises(RemoteError) as malformed:
            raise_if_error(await sender.request(work, b"\xc1nonsense", timeout_s=5.0))
        assert malformed.value.code == "malformed_message"
        sender.publish(SUBJECTS.stage("tokenizer", "x"), b"nonsense")  # without a reply subject too
        sender.publish(work, encode(7))
        await settle()
        assert behaviour.numbers == [7]
        tasks.cancel_scope.cancel()


async def test_peers_are_told_to_the_behaviour_from_first_word_to_silence(clock: ManualClock) -> None:
    bus, behaviour, other = MemoryBus(), Recording(), Recording("detokenizer")
    for one in (behaviour, other):
        one.may_start.set()
    actor, peer = make_actor(behaviour, bus, clock), make_actor(other, bus, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        async with anyio.create_task_group() as peers:
            peers.start_soon(peer.run)
            await actor.ready.wait()
            await peer.ready.wait()
            await settle()
            assert [one.instance for one in actor.directory.usable("detokenizer")] == [peer.instance]
            peers.cancel_scope.cancel()
            await peer.connection.close()  # not a word more
        behaviour.changes.clear()
        await clock.advance(TIMINGS.gone_s + TIMINGS.heartbeat_s)
        assert [change.news for change in behaviour.changes] == [PeerNews.SUSPECT, PeerNews.GONE]
        tasks.cancel_scope.cancel()


async def test_who_is_cut_off_judges_nobody_until_it_has_heard_again(clock: ManualClock) -> None:
    bus, behaviour, other = FaultyBus(), Recording(), Recording("detokenizer")
    for one in (behaviour, other):
        one.may_start.set()
    actor, peer = make_actor(behaviour, bus, clock), make_actor(other, bus, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        tasks.start_soon(peer.run)
        await actor.ready.wait()
        await peer.ready.wait()
        await settle()
        behaviour.changes.clear()
        bus.cut()
        await clock.advance(10 * TIMINGS.gone_s)
        assert behaviour.changes == []
        bus.mend(outage_s=60.0)
        await clock.advance(2 * TIMINGS.heartbeat_s)
        assert [type(event) for event in behaviour.events] == [Disconnected, Reconnected]
        assert PeerNews.GONE not in [change.news for change in behaviour.changes]
        assert [one.instance for one in actor.directory.usable("detokenizer")] == [peer.instance]
        tasks.cancel_scope.cancel()


def older(actor_instance: str, *, index: int = 0, state: StageState = StageState.READY) -> Announcement:
    return Announcement("tokenizer", index, actor_instance, "elsewhere", 99, state, started_at=EPOCH_S - 100.0)


async def test_a_live_older_instance_of_its_place_ends_it(clock: ManualClock) -> None:
    bus, behaviour = MemoryBus(), Recording()
    with pytest.raises(ExceptionGroup) as raised:
        async with listening(bus, SUBJECTS.discover()) as first, anyio.create_task_group() as tasks:
            tasks.start_soon(make_actor(behaviour, bus, clock).run)
            await first.receive()
            for _ in range(2):  # one that lives says it again
                first.publish(SUBJECTS.stage("tokenizer", "x"), encode_json(older("tokenizer-0-aaaaaaaa")))
    superseded = raised.value.split(Superseded)[0]
    assert superseded is not None
    assert not behaviour.numbers


@pytest.mark.parametrize(
    "other",
    [
        older("tokenizer-1-aaaaaaaa", index=1),
        older("tokenizer-0-aaaaaaaa", state=StageState.GONE),
        Announcement("tokenizer", 0, "tokenizer-0-zzzzzzzz", "e", 9, StageState.READY, started_at=EPOCH_S + 100.0),
        older("tokenizer-0-aaaaaaaa"),
    ],
    ids=["of another index", "gone", "younger", "older, but said only once"],
)
async def test_other_instances_do_not_end_it(clock: ManualClock, other: Announcement) -> None:
    bus, behaviour = MemoryBus(), Recording()
    behaviour.may_start.set()
    actor = make_actor(behaviour, bus, clock)
    async with listening(bus, "unused") as somebody, anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        await actor.ready.wait()
        somebody.publish(SUBJECTS.stage("tokenizer", "x"), encode_json(other))
        await settle()
        assert actor.connection.is_connected
        tasks.cancel_scope.cancel()


async def test_a_client_may_be_there_many_times(clock: ManualClock) -> None:
    bus, behaviour = MemoryBus(), Recording("tokenizer")
    behaviour.is_unique = False
    behaviour.may_start.set()
    actor = make_actor(behaviour, bus, clock)
    async with listening(bus, "unused") as somebody, anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        await actor.ready.wait()
        somebody.publish(SUBJECTS.stage("tokenizer", "x"), encode_json(older("tokenizer-0-aaaaaaaa")))
        await settle()
        assert actor.connection.is_connected
        tasks.cancel_scope.cancel()


async def test_a_drain_that_takes_too_long_is_cut_off(clock: ManualClock) -> None:
    """The limit is the settings' own, on the event loop's clock: none of the test's time passes."""
    bus, behaviour = MemoryBus(), Recording()
    behaviour.may_start.set()
    settings = ActorSettings(cluster="test", host="here", timings=Timings(drain_timeout_s=0.0))
    actor = Actor(behaviour, 0, bus, settings, clock)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.run)
            await actor.ready.wait()
            actor.stop()


def test_an_announcement_is_readable_json() -> None:
    text = encode_json(older("tokenizer-0-aaaaaaaa"))
    assert json.loads(text)["state"] == "ready"
    assert announcement_decoder.decode(text).instance == "tokenizer-0-aaaaaaaa"
