"""What a scheduler does at every step is about the sequences that have tokens, not about those that wait for a turn."""

from __future__ import annotations

from busllm.messages.to_detokenizer import MAX_UNACKNOWLEDGED
from busllm.stages.scheduler.held_sequence import HeldSequence
from busllm.stages.scheduler.held_table import HeldTable
from busllm.testing.looked_at import looked_at
from tests.stages.test_scheduler import MANY, Detokenizer, batches, generate, pytestmark, send, stage
from tests.stages.wire import DETOKENIZER, running

__all__ = ["pytestmark"]

OTHER_DETOKENIZER = "detokenizer-1-cccccccc"
NUM_HELD = 500


async def test_a_congested_detokenizer_costs_a_look_at_its_own_sequences_only() -> None:
    made = stage(max_running=2, max_waiting=NUM_HELD)
    async with running(made) as wire:
        await wire.announce(DETOKENIZER)
        for number in range(NUM_HELD):
            send(wire, generate(f"u{number}", MANY))
        await wire.until(lambda: len(batches(wire)) > MAX_UNACKNOWLEDGED)
        assert wire.statistics()["sequences"] == NUM_HELD
        with looked_at(HeldSequence) as seen:
            made.received_all()
        assert 1 <= len(seen) <= 2
        Detokenizer(wire).acknowledge()
        await wire.settle()
        with looked_at(HeldSequence) as seen:
            made.received_all()
        assert len(seen) == 0


async def test_sequences_are_spread_over_the_detokenizers_as_they_come_and_go() -> None:
    number, made = 120, stage(max_running=40)
    async with running(made) as wire:
        for detokenizer in (DETOKENIZER, OTHER_DETOKENIZER):
            await wire.announce(detokenizer)
        for each in range(number):
            send(wire, generate(f"u{each}", 4))

        def num_finished(*detokenizers: str) -> int:
            return sum(len(batch.finished) for one in detokenizers for batch in batches(wire, one))

        await wire.until(lambda: num_finished(DETOKENIZER, OTHER_DETOKENIZER) == number)
        assert abs(num_finished(DETOKENIZER) - number // 2) <= number // 10


def held(uid: str, attempt: int = 1) -> HeldSequence:
    message = generate(uid, attempt=attempt)
    return HeldSequence(message, message.choices[0])


def test_the_indexes_follow_what_is_held() -> None:
    table = HeldTable()
    first, second = held("a"), held("b")
    for one in (first, second):
        assert table.add(one)
        table.assign(one, DETOKENIZER)
    assert table.num_by_detokenizer() == {DETOKENIZER: 2}
    first.lost_detokenizer = True
    table.wait_changed(first)
    assert list(table.waiting) == [first]
    again = held("a", attempt=2)
    assert table.add(again)
    assert list(table.waiting) == []
    assert list(table.of_detokenizer(DETOKENIZER)) == [second]
    table.remove(second, finished=True)
    table.remove(again, finished=False)
    assert table.num_by_detokenizer() == {}
    assert list(table.of_detokenizer(DETOKENIZER)) == []


def test_who_needs_to_wait_no_longer_is_taken_off() -> None:
    table = HeldTable()
    one = held("a")
    table.add(one)
    one.lost_detokenizer = True
    table.wait_changed(one)
    one.lost_detokenizer = False
    table.wait_changed(one)
    table.wait_changed(one)
    assert list(table.waiting) == []
