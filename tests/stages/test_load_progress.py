"""What an engine's thread tells while it loads reaches everyone who waits for the stage."""

from __future__ import annotations

import threading

import anyio
import pytest

from busllm.actors.actor import Actor
from busllm.actors.clock import Timings
from busllm.actors.settings import ActorSettings
from busllm.bus.memory import MemoryBus
from busllm.bus.protocol import Message
from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.null import NullRunner
from busllm.messages.control import announcement_decoder
from busllm.stages.load_progress import LoadProgress
from busllm.stages.scheduler.stage import SchedulerStage
from busllm.telemetry.trace import TraceLevel
from busllm.testing.clock import ManualClock
from tests.stages.wire import PATIENCE_S, SUBJECTS

pytestmark = pytest.mark.anyio


async def test_what_takes_long_in_loading_is_announced() -> None:
    progress, may_go_on = LoadProgress(), threading.Event()

    def load() -> Engine:
        progress("compiling kernels, once for this CPU and version")
        may_go_on.wait(PATIENCE_S)
        return Engine(NullRunner(), EngineConfig(num_pages=64))

    bus = MemoryBus()
    listener = await bus.connect(name="ear", inbox="inbox.ear")
    await listener.subscribe(SUBJECTS.stage("*", "*"))
    settings = ActorSettings(cluster="test", host="here", timings=Timings(), trace_level=TraceLevel.OFF)
    actor = Actor(SchedulerStage(load, progress), 0, bus, settings, ManualClock())
    told: list[str] = []
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.run)
            while "compiling kernels, once for this CPU and version" not in told:
                heard = [item for item in await listener.receive() if isinstance(item, Message)]
                told += [announcement_decoder.decode(message.payload).progress for message in heard]
            assert told.index("loading the model") < len(told) - 1
            may_go_on.set()
            await actor.ready.wait()
            assert actor.announcement().progress == ""
            tasks.cancel_scope.cancel()
