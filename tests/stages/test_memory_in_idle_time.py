"""Memory is used for the first time while the engine has nothing else to do."""

from __future__ import annotations

import threading
import time
from functools import partial

import anyio
import anyio.to_thread
import pytest

from busllm.engine.null import NullRunner
from tests.stages.test_engine_thread import PATIENCE_S, read_to_ends, request, thread_of

pytestmark = pytest.mark.anyio


class Forgetful(NullRunner):
    """Has memory to prepare for so many calls, each of which must be allowed; says so when one has begun."""

    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self.num_calls = num_calls
        self.may_prepare, self.has_begun = threading.Semaphore(0), threading.Semaphore(0)

    def prefault_memory(self) -> bool:
        self.num_calls -= 1
        self.has_begun.release()
        assert self.may_prepare.acquire(timeout=PATIENCE_S)
        return self.num_calls > 0


async def test_memory_is_prepared_while_nothing_runs_and_requests_come_first() -> None:
    runner = Forgetful(3)
    async with thread_of(lambda: runner) as thread:
        assert runner.has_begun.acquire(timeout=PATIENCE_S)
        thread.submit(request("u"))
        runner.may_prepare.release()  # the first call ends; the request is computed before the second may end
        assert await read_to_ends(thread, {"u"}) == {"u": 3}
        runner.may_prepare.release(2)
        for _ in range(2):
            assert await anyio.to_thread.run_sync(partial(runner.has_begun.acquire, timeout=PATIENCE_S))
        thread.submit(request("v"))
        assert await read_to_ends(thread, {"v"}) == {"v": 3}
    assert runner.num_calls == 0, "and then no more"


class Endless(NullRunner):
    """Always has memory to prefault."""

    num_calls = 0

    def prefault_memory(self) -> bool:
        self.num_calls += 1
        time.sleep(0.001)
        return True


async def test_pausing_and_closing_wait_for_no_memory() -> None:
    runner = Endless()
    async with thread_of(lambda: runner) as thread:
        thread.pause(True)
        thread.submit(request("u"))
        thread.pause(False)
        assert await read_to_ends(thread, {"u"}) == {"u": 3}
    before = runner.num_calls
    assert before
    await anyio.sleep(0.02)
    assert runner.num_calls == before, "the thread has ended"
