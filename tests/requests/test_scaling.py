"""What an owner does is as much as there is to do, not as much as there are open requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from busllm.actors.clock import Timings
from busllm.errors import QueueFull
from busllm.messages.to_frontend import Taken
from busllm.requests.live import LiveRequest
from busllm.requests.watch import MAX_LOOKS
from busllm.testing.looked_at import looked_at
from tests.requests.played import SCHEDULER, Stages, playing, request

pytestmark = pytest.mark.anyio

TIMINGS = Timings()
MANY = 5_000


@pytest.fixture
async def stages() -> AsyncIterator[Stages]:
    async with playing(max_queued=MANY) as stages:
        yield stages


async def running_requests(stages: Stages, number: int) -> list[LiveRequest]:
    """Requests that a scheduler has, each of which has just been heard of."""
    lives = [stages.owner.submit(request()) for _ in range(number)]
    for live in lives:
        stages.knows.setdefault(SCHEDULER, {})[live.uid] = ((0, 1, "waiting", 0),)
    await stages.wire.settle()
    for live in lives:
        await stages.until_running(live)
    return lives


async def test_a_tick_looks_at_no_request_that_has_just_spoken(stages: Stages) -> None:
    await running_requests(stages, 30)
    await stages.pass_time(TIMINGS.tick_s)
    with looked_at(LiveRequest) as seen:
        await stages.pass_time(3 * TIMINGS.tick_s)
    assert len(seen) == 0


async def test_within_a_second_every_request_is_looked_at_a_few_times_only(stages: Stages) -> None:
    lives = await running_requests(stages, 30)
    await stages.pass_time(TIMINGS.silence_s + TIMINGS.tick_s)
    assert {uid for _, uid in stages.probed} == {live.uid for live in lives}
    stages.probed.clear()
    with looked_at(LiveRequest) as seen:
        await stages.pass_time(TIMINGS.silence_s + TIMINGS.tick_s)
    assert len(stages.probed) == len(seen) == len(lives)


async def test_a_tick_looks_at_a_bounded_number_and_the_next_ones_at_the_rest(stages: Stages) -> None:
    for _ in range(MANY):
        stages.owner.submit(request())
    looks = []
    for _ in range(4):
        with looked_at(LiveRequest) as seen:
            stages.owner._watch.tick()
        looks.append(len(seen))
    assert looks == [MAX_LOOKS, MAX_LOOKS, MANY - 2 * MAX_LOOKS, 0]


async def test_a_new_request_and_a_reply_touch_no_other_request(stages: Stages) -> None:
    first, *_ = await running_requests(stages, 30)
    with looked_at(LiveRequest) as seen:
        stages.owner.submit(request())
    assert len(seen) == 1
    with looked_at(LiveRequest) as seen:
        await stages.tell(first, Taken(first.uid, 1, "detokenizer", "detokenizer-0-cccccccc"))
        await stages.text(first, 0, "ab")
    assert len(seen) == 1


async def test_a_full_queue_is_refused_without_a_look_at_it() -> None:
    async with playing(max_queued=30) as stages:
        lives = [stages.owner.submit(request()) for _ in range(30)]
        with looked_at(LiveRequest) as seen, pytest.raises(QueueFull):
            stages.owner.submit(request())
        assert len(seen) == 0
        await stages.until_running(lives[0])
        await stages.text(lives[0], 0, "a")
        stages.owner.submit(request())  # in place of one that has text
        with pytest.raises(QueueFull):
            stages.owner.submit(request())
        stages.owner.abort(lives[1].uid)
        stages.owner.submit(request())  # in place of one that has left


async def test_an_owner_is_asked_about_some_requests_or_about_all(stages: Stages) -> None:
    lives = [stages.owner.submit(request()) for _ in range(3)]
    everything = json.loads(stages.owner.live_answer())["live"]
    assert sorted(everything) == sorted([live.uid, 1] for live in lives)
    with looked_at(LiveRequest) as seen:
        answer = json.loads(stages.owner.live_answer(b'{"uids": ["unknown", "%s"]}' % lives[1].uid.encode()))
    assert answer["live"] == [[lives[1].uid, 1]]
    assert len(seen) == 1
