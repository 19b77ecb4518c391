"""The thread that an engine runs in: nothing sent is overlooked, and its failure is told."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.null import NullRunner
from busllm.engine.runner import Runner
from busllm.engine.sequence import EngineStatistics, SequenceRequest, StepOutput
from busllm.errors import EngineError, ModelError
from busllm.plan import StepPlan, StepResult
from busllm.sampling import Grammar, GrammarKind, SamplingParams
from busllm.stages.scheduler.engine_thread import Crashed, EngineThread, Refused
from busllm.testing.null_engine import null_grammars

pytestmark = pytest.mark.anyio

CONFIG = EngineConfig(num_pages=1024, max_running=64, max_context_tokens=4000)
PATIENCE_S = 30.0
PROMPT_IDS = np.arange(60, 64, dtype=np.int32)

Output = TypeVar("Output", Refused, Crashed)


def request(uid: str, max_tokens: int = 3, prompt_tokens: int = 4) -> SequenceRequest:
    prompt = np.arange(prompt_tokens, dtype=np.int32) % 200
    return SequenceRequest(uid, 0, 1, prompt, np.zeros(0, np.int32), SamplingParams(max_tokens=max_tokens), seed=1)


@asynccontextmanager
async def thread_of(make: Callable[[], Runner] = NullRunner) -> AsyncIterator[EngineThread]:
    thread = EngineThread(lambda: Engine(make(), CONFIG))
    with anyio.fail_after(PATIENCE_S):
        await thread.start()
        try:
            yield thread
        finally:
            await thread.close()


async def read_to_ends(thread: EngineThread, uids: set[str]) -> dict[str, int]:
    """Reads until all of these have finished; returns how many tokens each got."""
    counts: dict[str, int] = dict.fromkeys(uids, 0)
    waiting = set(uids)
    while waiting:
        for output in await thread.receive():
            assert isinstance(output, StepOutput)
            for tokens in output.tokens:
                counts[tokens.uid] = counts.get(tokens.uid, 0) + len(tokens.token_ids)
                if tokens.finish_reason is not None:
                    waiting.discard(tokens.uid)
    return counts


async def first_of(thread: EngineThread, kind: type[Output]) -> Output:
    """Reads until an output of that kind comes."""
    while True:
        for output in await thread.receive():
            if isinstance(output, kind):
                return output


class Broken(NullRunner):
    """Fails at its second step."""

    def collect(self, handle: int) -> StepResult:
        if handle >= 2:
            raise ZeroDivisionError("one step too many")
        return super().collect(handle)


class Gated(NullRunner):
    """Steps one at a time, when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_step = threading.Semaphore(0)
        self.has_begun = threading.Event()

    def launch(self, plan: StepPlan) -> int:
        self.has_begun.set()
        assert self.may_step.acquire(timeout=PATIENCE_S)
        return super().launch(plan)


async def test_what_is_submitted_is_computed_to_its_end() -> None:
    async with thread_of() as thread:
        for number in range(20):
            thread.submit(request(f"u{number}"))
        counts = await read_to_ends(thread, {f"u{number}" for number in range(20)})
        assert counts == {f"u{number}": 3 for number in range(20)}


async def test_a_failing_load_is_raised_where_the_thread_is_started() -> None:
    def broken() -> Engine:
        raise ModelError("the weights are damaged")

    thread = EngineThread(broken)
    with anyio.fail_after(PATIENCE_S), pytest.raises(ModelError, match="damaged"):
        await thread.start()
    await thread.close()


async def test_a_failing_step_is_told_with_its_cause() -> None:
    async with thread_of(Broken) as thread:
        thread.submit(request("u", max_tokens=10))
        crash = await first_of(thread, Crashed)
        assert isinstance(crash.error, EngineError)
        assert isinstance(crash.error.__cause__, ZeroDivisionError)
        assert "ZeroDivisionError: one step too many" in str(crash.error)


async def test_a_refusal_comes_back_with_its_request() -> None:
    async with thread_of() as thread:
        thread.submit(request("u", prompt_tokens=5000))
        refused = await first_of(thread, Refused)
        assert (refused.request.uid, refused.error.code) == ("u", "context_length_exceeded")


async def test_a_paused_engine_takes_no_step_and_then_goes_on() -> None:
    async with thread_of() as thread:
        thread.pause(True)
        thread.submit(request("u"))
        await thread.reset_cache()  # an answer: everything sent before it was taken
        assert thread.statistics is not None
        steps = thread.statistics.steps
        thread.pause(False)
        assert await read_to_ends(thread, {"u"}) == {"u": 3}
        assert steps == 0


async def test_held_sequences_stay_out_while_others_are_computed() -> None:
    async with thread_of() as thread:
        thread.hold({("u", 0)})
        thread.submit(request("u"))
        thread.submit(request("v"))
        assert "u" not in {uid for uid, count in (await read_to_ends(thread, {"v"})).items() if count}
        thread.hold(())
        assert await read_to_ends(thread, {"u"}) == {"u": 3}


async def test_an_aborted_sequence_gives_nothing_more() -> None:
    runner = Gated()
    async with thread_of(lambda: runner) as thread:
        thread.submit(request("u", max_tokens=1000))
        assert await anyio.to_thread.run_sync(runner.has_begun.wait, PATIENCE_S)
        thread.abort("u", None)
        thread.submit(request("v"))
        runner.may_step.release(100)
        counts = await read_to_ends(thread, {"v"})
        assert counts["v"] == 3
        assert counts.get("u", 0) <= 1


async def test_a_step_that_takes_for_ever_is_seen_from_outside() -> None:
    runner = Gated()
    async with thread_of(lambda: runner) as thread:
        assert thread.stalled_for_s(0.0, 1.0) is None, "nothing runs"
        thread.submit(request("u", max_tokens=1))
        assert await anyio.to_thread.run_sync(runner.has_begun.wait, PATIENCE_S)
        assert thread.stalled_for_s(1000.0, 1.0) is None
        lasted_s = thread.stalled_for_s(0.0, 1.0)
        assert lasted_s is not None
        assert lasted_s > 0
        runner.may_step.release()
        await read_to_ends(thread, {"u"})


async def test_no_wake_up_is_lost_when_both_sides_are_in_a_hurry() -> None:
    """Each request is sent the moment the one before has ended, when the thread is about to fall asleep."""
    async with thread_of() as thread:
        for number in range(1500):
            thread.submit(request(f"u{number}", max_tokens=1 + number % 2))
            if number % 3 == 0:
                await anyio.lowlevel.checkpoint()
            await read_to_ends(thread, {f"u{number}"})


class Drowsy(Engine):
    """Tells when its thread is about to fall asleep, and then waits."""

    def __init__(self) -> None:
        super().__init__(NullRunner(), CONFIG)
        self.is_drowsy = threading.Event()
        self.may_sleep = threading.Event()
        self.may_sleep.set()
        self._num_idle_looks = 0

    def statistics(self) -> EngineStatistics:
        self._num_idle_looks = 0 if self.has_work else self._num_idle_looks + 1
        if not self.may_sleep.is_set() and self._num_idle_looks == 2:  # the first one follows the last step
            self.is_drowsy.set()
            assert self.may_sleep.wait(PATIENCE_S)
        return super().statistics()


async def test_what_is_sent_to_a_thread_that_falls_asleep_wakes_it() -> None:
    engine = Drowsy()
    thread = EngineThread(lambda: engine)
    with anyio.fail_after(PATIENCE_S):
        await thread.start()
        engine.may_sleep.clear()
        thread.submit(request("first"))
        assert await anyio.to_thread.run_sync(engine.is_drowsy.wait, PATIENCE_S)
        thread.submit(request("second"))  # after its last look, before its sleep
        engine.may_sleep.set()
        await read_to_ends(thread, {"first", "second"})
        await thread.close()


async def test_no_output_is_lost_under_a_storm() -> None:
    lots = random.Random(3)
    async with thread_of() as thread:
        uids = {f"u{number}" for number in range(600)}

        async def send() -> None:
            for uid in sorted(uids):
                thread.submit(request(uid, max_tokens=lots.randint(1, 4)))
                if lots.random() < 0.3:
                    await anyio.lowlevel.checkpoint()
                if lots.random() < 0.02:
                    thread.hold({(uid, 0)})
                    thread.hold(())
                    time.sleep(0.0005)  # noqa: ASYNC251 - the event loop is busy with something else

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            counts = await read_to_ends(thread, uids)
        assert all(1 <= count <= 4 for count in counts.values())


async def test_closing_ends_the_thread_whatever_it_does() -> None:
    before = set(threading.enumerate())
    for pause in (False, True):
        async with thread_of() as thread:
            thread.pause(pause)
            thread.submit(request("u", max_tokens=3000))
        assert "engine" not in {one.name for one in set(threading.enumerate()) - before}


async def test_a_sequence_that_the_engine_gives_up_comes_back_as_refused_and_others_go_on() -> None:
    grammars = null_grammars()
    thread = EngineThread(lambda: Engine(NullRunner(grammars=grammars), CONFIG, grammars))
    digits = Grammar(GrammarKind.REGEX, "[0-9]{8}")
    astray = SequenceRequest("a", 0, 2, PROMPT_IDS, PROMPT_IDS, SamplingParams(max_tokens=9, grammar=digits), seed=1)
    with anyio.fail_after(PATIENCE_S):
        await thread.start()
        try:
            thread.submit(astray)
            refused = await first_of(thread, Refused)
            thread.submit(request("b"))
            assert await read_to_ends(thread, {"b"}) == {"b": 3}
        finally:
            await thread.close()
    assert (refused.request.uid, refused.request.attempt, refused.error.status) == ("a", 2, 400)


async def ask_in_vain(thread: EngineThread) -> None:
    with pytest.raises(EngineError, match="has ended"):
        await thread.reset_cache()


async def test_a_question_that_a_closing_thread_does_not_come_to_fails() -> None:
    runner = Gated()
    async with thread_of(lambda: runner) as thread, anyio.create_task_group() as tasks:
        thread.submit(request("u"))
        assert await anyio.to_thread.run_sync(runner.has_begun.wait, PATIENCE_S)
        tasks.start_soon(ask_in_vain, thread)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(thread.close)
        await anyio.wait_all_tasks_blocked()
        runner.may_step.release()


async def test_a_question_to_a_thread_that_has_failed_fails() -> None:
    async with thread_of(Broken) as thread:
        thread.submit(request("u"))
        await first_of(thread, Crashed)
        await ask_in_vain(thread)
