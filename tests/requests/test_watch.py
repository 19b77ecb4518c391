"""Silence is asked about; what the answers mean; what is given up and when."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from busllm.actors.clock import Timings
from busllm.errors import Lost, ResumeDeadlineExceeded
from busllm.messages.codec import encode_json
from busllm.messages.control import StageState, error_answer
from busllm.messages.to_frontend import Taken
from busllm.requests.live import LiveRequest
from tests.requests.played import (
    OTHER_SCHEDULER,
    TOKENIZER,
    Known,
    Stages,
    playing,
    read,
    request,
)
from tests.stages.wire import DETOKENIZER, SCHEDULER

pytestmark = pytest.mark.anyio

TIMINGS = Timings()


@pytest.fixture
async def stages() -> AsyncIterator[Stages]:
    async with playing() as stages:
        yield stages


async def running_request(stages: Stages, text: str = "ab") -> LiveRequest:
    live = stages.owner.submit(request())
    await stages.until_running(live)
    if text:
        await stages.tell(live, Taken(live.uid, 1, "detokenizer", DETOKENIZER))
        await stages.text(live, 0, text)
    return live


async def test_a_request_that_nobody_takes_goes_to_another_attempt(stages: Stages) -> None:
    live = stages.owner.submit(request())
    await stages.pass_time(TIMINGS.taken_s + 0.2)
    assert [message.attempt for message in stages.tokenize(live)] == [1, 2]
    assert stages.tokenize(live)[1].avoid == (TOKENIZER,)
    assert stages.aborts(live) == [b"1"]


async def test_one_that_speaks_is_not_asked_about(stages: Stages) -> None:
    live = await running_request(stages)
    for index in range(2, 8):
        await stages.pass_time(0.5)
        await stages.text(live, index, "x")
    assert stages.probed == []


async def test_nobody_is_asked_while_nobody_is_silent(stages: Stages) -> None:
    live = await running_request(stages)
    await stages.pass_time(0.9)
    await stages.text(live, 2, "x")
    await stages.pass_time(0.9)
    assert [message for message in stages.wire.heard if message.subject.endswith(".probe")] == []


async def test_a_silent_one_is_asked_about_at_its_scheduler(stages: Stages) -> None:
    live = await running_request(stages)
    stages.knows = {SCHEDULER: {live.uid: ((0, 1, "running", 2),)}}
    await stages.pass_time(TIMINGS.silence_s + 0.2)
    assert set(stages.probed) == {(SCHEDULER, live.uid)}


@pytest.mark.parametrize("known", [(0, 1, "running", 2), (0, 1, "waiting", 2), (0, 1, "waiting", 9)])
async def test_a_request_that_is_well_is_left_alone(stages: Stages, known: Known) -> None:
    live = await running_request(stages)
    stages.knows = {SCHEDULER: {live.uid: (known,)}}
    await stages.pass_time(5.0)
    assert live.attempt == 1
    assert len(stages.probed) >= 4, "it is asked about again and again"


@pytest.mark.parametrize(
    "at_scheduler",
    [(), ((0, 1, "finished", 9),), ((0, 1, "running", 9),), ((0, 1, "lost", 2),), ((1, 1, "running", 2),)],
    ids=["unknown", "finished without us", "what it made does not come", "its detokenizer is lost", "another choice"],
)
async def test_a_request_that_is_lost_is_sent_on_after_the_second_look(
    stages: Stages, at_scheduler: tuple[Known, ...]
) -> None:
    live = await running_request(stages)
    stages.knows = {SCHEDULER: {live.uid: at_scheduler}}
    await stages.pass_time(TIMINGS.silence_s + 0.15)
    assert live.attempt == 1, "once may be a message that is on its way"
    await stages.pass_time(TIMINGS.strike_s + 0.2)
    assert live.attempt == 2
    assert [sent.attempt for _, sent in stages.generate(live)] == [2]


async def test_a_word_between_two_looks_clears_it(stages: Stages) -> None:
    live = await running_request(stages)
    await stages.pass_time(TIMINGS.silence_s + 0.15)
    await stages.text(live, 2, "c")
    await stages.pass_time(TIMINGS.strike_s + 0.2)
    assert live.attempt == 1


async def test_an_error_for_an_answer_is_no_answer(stages: Stages) -> None:
    live = await running_request(stages)

    def refuse(message: object) -> None:
        reply = message.reply  # type: ignore[attr-defined]
        stages.probed.append(("", live.uid))
        stages.wire.connection.publish(reply, error_answer(Lost("broken")))

    stages.answer_probe = refuse  # type: ignore[method-assign]
    await stages.pass_time(3.5)
    assert len(stages.probed) > 2
    stages.answer_probe = lambda message: stages.wire.connection.publish(  # type: ignore[method-assign]
        message.reply, encode_json(7)
    )
    await stages.pass_time(2.0)
    assert (live.attempt, live.is_done) == (1, False)


async def test_a_holder_that_is_gone_is_left_at_once(stages: Stages) -> None:
    stages.present.append(OTHER_SCHEDULER)
    await stages.announce()
    live = await running_request(stages)
    await stages.wire.announce(SCHEDULER, StageState.GONE)
    ((scheduler, sent),) = stages.generate(live)
    assert (scheduler, sent.attempt) == (OTHER_SCHEDULER, 2)
    await stages.wire.announce(DETOKENIZER, StageState.GONE)
    assert live.attempt == 2, "the new scheduler has not chosen that detokenizer"


async def test_a_suspect_is_left_only_when_there_is_another(stages: Stages) -> None:
    live = await running_request(stages)
    stages.knows = {DETOKENIZER: {live.uid: ((0, 1, "running", 2),)}, SCHEDULER: {live.uid: ((0, 1, "running", 2),)}}
    stages.present.remove(SCHEDULER)
    await stages.pass_time(TIMINGS.suspect_s + 1.0)
    assert live.attempt == 1
    assert live.uid in {uid for _, uid in stages.probed}


async def test_a_suspect_is_left_for_another(stages: Stages) -> None:
    stages.present.append(OTHER_SCHEDULER)
    await stages.announce()
    live = await running_request(stages)
    stages.knows = {DETOKENIZER: {live.uid: ((0, 1, "running", 2),)}, SCHEDULER: {live.uid: ((0, 1, "running", 2),)}}
    stages.present.remove(SCHEDULER)
    await stages.pass_time(TIMINGS.suspect_s + 1.0)
    assert [scheduler for scheduler, _ in stages.generate(live)][:1] == [OTHER_SCHEDULER]


async def lose_and_restart(stages: Stages, live: LiveRequest, attempt: int) -> None:
    """The scheduler ends; the one that is started in its place, which has a name of its own, takes the request."""
    restarted = f"scheduler-0-{'abcdefgh'[attempt] * 8}"
    assert live.scheduler is not None
    await stages.wire.announce(live.scheduler, StageState.GONE)
    await stages.wire.announce(restarted)
    await stages.tell(live, Taken(live.uid, attempt, "scheduler", restarted))


async def test_a_request_that_ends_whoever_holds_it_is_given_up(stages: Stages) -> None:
    live = await running_request(stages)
    for attempt in range(2, TIMINGS.max_holders_lost + 3):
        await lose_and_restart(stages, live, attempt)
    with pytest.raises(Lost, match="3 stages in a row died"):
        await read(live)
    assert stages.owner.num_open == 0


async def test_a_new_token_forgives_the_losses_before_it(stages: Stages) -> None:
    live = await running_request(stages)
    for attempt in range(2, 2 * TIMINGS.max_holders_lost + 2):
        await lose_and_restart(stages, live, attempt)
        await stages.text(live, attempt, "x", attempt=attempt)
    assert not live.is_done


async def fall_silent_and_return(stages: Stages, scheduler: str) -> None:
    stages.answer_probe = lambda message: None  # type: ignore[method-assign]
    stages.present.remove(scheduler)
    await stages.pass_time(TIMINGS.gone_s + 0.5)
    stages.present.append(scheduler)
    await stages.announce()


async def test_a_slow_holder_that_falls_silent_again_and_again_is_no_row_of_dead_ones(stages: Stages) -> None:
    live = await running_request(stages)
    for num_silences in range(1, TIMINGS.max_holders_lost + 3):
        await fall_silent_and_return(stages, SCHEDULER)
        assert (live.is_done, live.scheduler, live.attempt) == (False, SCHEDULER, num_silences + 1)
        await stages.tell(live, Taken(live.uid, live.attempt, "scheduler", SCHEDULER))
    await stages.text(live, 2, "c", attempt=live.attempt)
    assert live.trouble_since is None


async def test_a_holder_that_is_heard_again_counts_no_more(stages: Stages) -> None:
    live = await running_request(stages)
    stages.answer_probe = lambda message: None  # type: ignore[method-assign]
    for attempt in range(2, TIMINGS.max_holders_lost + 2):
        another = f"scheduler-1-{'abcdefgh'[attempt] * 8}"
        stages.present = [TOKENIZER, DETOKENIZER]
        await stages.pass_time(TIMINGS.gone_s + 0.5)  # the slow one falls silent, and another one takes over
        stages.present = [TOKENIZER, DETOKENIZER, another]
        await stages.announce()
        assert live.scheduler == another
        await stages.tell(live, Taken(live.uid, live.attempt, "scheduler", another))
        stages.present = [TOKENIZER, DETOKENIZER, SCHEDULER]
        await stages.announce()
        await stages.wire.announce(another, StageState.GONE)
        await stages.pass_time(1.0)  # several tries in a row are followed by a pause
        assert (live.is_done, live.scheduler) == (False, SCHEDULER), "the slow one is none of those that died"
        await stages.tell(live, Taken(live.uid, live.attempt, "scheduler", SCHEDULER))


async def test_a_request_that_nobody_can_take_over_ends_in_time(stages: Stages) -> None:
    live = await running_request(stages)
    stages.present.remove(SCHEDULER)
    await stages.wire.announce(SCHEDULER, StageState.GONE)
    await stages.pass_time(2.0)
    assert not live.is_done
    await stages.wire.clock.advance(1.0)
    stages.present.append(OTHER_SCHEDULER)
    await stages.announce()
    assert [scheduler for scheduler, _ in stages.generate(live)] == [OTHER_SCHEDULER]
    await stages.wire.announce(OTHER_SCHEDULER, StageState.GONE)
    live.trouble_since = stages.wire.clock.monotonic() - TIMINGS.resume_deadline_s
    stages.present.remove(OTHER_SCHEDULER)
    await stages.pass_time(0.5)
    with pytest.raises(ResumeDeadlineExceeded):
        await read(live)
    assert stages.aborts(live)[-1] == b""
