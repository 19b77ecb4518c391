"""A stage asks owners which of the requests that it holds are still waited for, some at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from busllm.actors.clock import Timings
from busllm.bus.protocol import Message
from busllm.messages.codec import encode_json
from busllm.messages.control import LiveAnswer, probe_decoder
from busllm.requests.orphans import MAX_ASKED
from tests.stages.test_scheduler import generate, send, stage
from tests.stages.wire import FRONTEND, Wire, running

pytestmark = pytest.mark.anyio

OTHER_FRONTEND = "frontend-1-aaaaaaaa"
NUM_HELD = 2 * MAX_ASKED + 7


class Owners:
    """Answers for the frontends.

    Attributes:
        live: attempts that are still waited for.
        asked: the uids of each question, by the owner that was asked.
    """

    def __init__(self, wire: Wire) -> None:
        self.live: dict[str, int] = {}
        self.asked: dict[str, list[tuple[str, ...]]] = {}
        self._wire = wire

    async def answer(self) -> None:
        """Takes questions until cancelled."""
        seen = 0
        while True:
            questions = [message for message in self._wire.heard if message.subject.endswith(".live")]
            for message in questions[seen:]:
                self._answer(message)
            seen = len(questions)
            await self._wire.next_message()

    def _answer(self, message: Message) -> None:
        uids = probe_decoder.decode(message.payload).uids
        owner = message.subject.split(".")[3]
        self.asked.setdefault(owner, []).append(uids)
        live = tuple((uid, self.live[uid]) for uid in uids if uid in self.live)
        assert message.reply is not None
        self._wire.connection.publish(message.reply, encode_json(LiveAnswer(owner, live)))


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with running(stage(num_pages=2, max_running=1, max_waiting=NUM_HELD)) as wire:
        yield wire


async def test_it_asks_about_what_it_holds_in_pieces_and_drops_what_nobody_waits_for(wire: Wire) -> None:
    owners = Owners(wire)
    for number in range(NUM_HELD):
        send(wire, generate(f"u{number}", attempt=2))
        owners.live[f"u{number}"] = 2
    send(wire, generate("other", frontend=OTHER_FRONTEND))
    await wire.until(lambda: wire.statistics()["sequences"] == NUM_HELD + 1)
    del owners.live["u3"]  # ended meanwhile, and the abort was lost
    owners.live["u4"] = 3  # sent on elsewhere
    owners.live["u5"] = 1  # nonsense
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owners.answer)
        await wire.clock.advance(Timings().orphan_check_s)
        await wire.until(lambda: wire.statistics()["sequences"] == NUM_HELD - 2)
        tasks.cancel_scope.cancel()
    assert [len(uids) for uids in owners.asked[FRONTEND]] == [MAX_ASKED, MAX_ASKED, 7]
    assert {uid for uids in owners.asked[FRONTEND] for uid in uids} == {f"u{number}" for number in range(NUM_HELD)}
    assert owners.asked[OTHER_FRONTEND] == [("other",)]
    held = (await wire.ask("probe", {"uids": ["u3", "u4", "u5", "u6", "other"]}))["sequences"]
    assert set(held) == {"u5", "u6"}
