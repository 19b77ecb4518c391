"""The detokenizer stage alone: rows of token ids in, rows of text out, holes told, stop strings found."""

from __future__ import annotations

from typing import Any

import pytest

from busllm.messages.codec import pack_ids, unpack_ids
from busllm.messages.control import StageState
from busllm.messages.to_detokenizer import ACKNOWLEDGED_EVERY, SequenceOpened, StepTokens
from busllm.messages.to_frontend import Failed, StepText, Taken
from busllm.messages.to_frontend import decoder as to_frontend
from busllm.messages.to_scheduler import StopMatched
from busllm.messages.to_scheduler import decoder as to_scheduler
from busllm.stages.detokenizer.stage import DetokenizerStage
from busllm.text.null_tokenizer import NullTokenizer
from tests.stages.wire import FRONTEND, SCHEDULER, SUBJECTS, Wire, running

pytestmark = pytest.mark.anyio

Row = tuple[int, int, str]  # handle, index of the first token, text (a token is a byte)


def opened(handle: int, uid: str, **fields: Any) -> SequenceOpened:
    values: dict[str, Any] = {
        "choice": 0, "attempt": 1, "frontend": FRONTEND, "prompt_tail": b"", "output_ids": b"", "delivered_chars": 0,
        "stop": (), "skip_special_tokens": True, "prompt_tokens": 3, "cached_tokens": 1,
    }  # fmt: skip
    return SequenceOpened(handle=handle, uid=uid, **(values | fields))


def ids(text: str) -> bytes:
    return pack_ids(list(text.encode()))


class Scheduler:
    """Numbers the batches."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._number = 0

    def send(
        self,
        *rows: Row,
        new: tuple[SequenceOpened, ...] = (),
        finished: dict[int, str] | None = None,
        reply: str | None = None,
    ) -> None:
        """Sends the next batch."""
        self._number += 1
        texts = [text.encode() for _, _, text in rows]
        offsets = [sum(map(len, texts[:row])) for row in range(len(rows) + 1)]
        batch = StepTokens(
            SCHEDULER,
            self._number,
            new,
            pack_ids([handle for handle, _, _ in rows]),
            pack_ids([index for _, index, _ in rows]),
            pack_ids(offsets),
            pack_ids(list(b"".join(texts))),
            tuple((finished or {}).items()),
        )
        self._wire.send(SUBJECTS.detokenize(self._wire.actor.instance), batch, reply)

    async def step(
        self, *rows: Row, new: tuple[SequenceOpened, ...] = (), finished: dict[int, str] | None = None
    ) -> None:
        """Sends the next batch and lets it be taken."""
        self.send(*rows, new=new, finished=finished)
        await self._wire.settle()


def text_rows(wire: Wire, uid: str) -> list[tuple[int, str, list[int]]]:
    """(index, text, token ids) of each row that a frontend was sent about a request."""
    rows = []
    for message in wire.said(SUBJECTS.reply_step(FRONTEND)):
        batch = to_frontend.decode(message.payload)
        assert isinstance(batch, StepText)
        indexes, offsets = unpack_ids(batch.indexes).tolist(), unpack_ids(batch.offsets).tolist()
        token_ids = unpack_ids(batch.token_ids).tolist()
        for row, name in enumerate(batch.uids):
            if name == uid:
                rows.append((indexes[row], batch.texts[row], token_ids[offsets[row] : offsets[row + 1]]))
    return rows


def text_of(wire: Wire, uid: str) -> str:
    return "".join(text for _, text, _ in text_rows(wire, uid))


def ends(wire: Wire) -> list[tuple[str, str, int]]:
    """(uid, reason, completion tokens) of the sequences that ended."""
    found = []
    for message in wire.said(SUBJECTS.reply_step(FRONTEND)):
        batch = to_frontend.decode(message.payload)
        found += [(batch.uids[row], reason, usage.completion_tokens) for row, reason, usage in batch.finished]
    return found


def failures(wire: Wire, uid: str) -> list[Failed]:
    replies = [to_frontend.decode(message.payload) for message in wire.said(SUBJECTS.reply(FRONTEND, uid))]
    return [reply for reply in replies if isinstance(reply, Failed)]


@pytest.fixture
async def wire() -> Any:
    async with running(DetokenizerStage(NullTokenizer)) as wire:
        await wire.announce(SCHEDULER)
        yield wire


@pytest.fixture
def scheduler(wire: Wire) -> Scheduler:
    return Scheduler(wire)


async def test_one_batch_of_tokens_becomes_one_batch_of_text(wire: Wire, scheduler: Scheduler) -> None:
    await scheduler.step((0, 0, "ab"), (1, 0, "x"), new=(opened(0, "u"), opened(1, "v")))
    await scheduler.step((0, 2, "c"), (1, 1, "y"), finished={1: "length"})
    assert len(wire.said(SUBJECTS.reply_step(FRONTEND))) == 2
    assert text_rows(wire, "u") == [(0, "ab", [97, 98]), (2, "c", [99])]
    assert text_of(wire, "v") == "xy"
    assert ends(wire) == [("v", "length", 2)]
    assert wire.statistics() == {"open_sequences": 1, "tokens": 5, "finished": 1}
    assert wire.events("v") == ["finished"]
    (event,) = wire.actor.trace.events_of("v")
    assert event.data == {"choice": 0, "reason": "length", "tokens": 2}


async def test_taking_a_sequence_is_said_at_once(wire: Wire, scheduler: Scheduler) -> None:
    await scheduler.step(new=(opened(0, "u", attempt=3),))
    (message,) = wire.said(SUBJECTS.reply(FRONTEND, "u"))
    assert to_frontend.decode(message.payload) == Taken("u", 3, "detokenizer", wire.actor.instance, (0,))


async def test_a_hole_loses_the_sequence_and_no_other(wire: Wire, scheduler: Scheduler) -> None:
    await scheduler.step((0, 0, "ab"), (1, 0, "x"), new=(opened(0, "u"), opened(1, "v")))
    await scheduler.step((0, 3, "d"), (1, 1, "y"))
    (lost,) = failures(wire, "u")
    assert (lost.code, lost.retryable, lost.attempt) == ("lost", True, 1)
    await scheduler.step((0, 4, "e"), (1, 2, "z"))
    assert (text_of(wire, "u"), text_of(wire, "v")) == ("ab", "xyz")
    assert len(failures(wire, "u")) == 1
    assert wire.statistics()["open_sequences"] == 1


async def test_tokens_that_come_again_are_skipped(wire: Wire, scheduler: Scheduler) -> None:
    await scheduler.step((0, 0, "abc"), new=(opened(0, "u"),))
    await scheduler.step((0, 1, "bcde"))
    await scheduler.step((0, 0, "ab"))
    assert text_of(wire, "u") == "abcde"
    assert failures(wire, "u") == []


async def test_a_character_waits_for_its_last_token(wire: Wire, scheduler: Scheduler) -> None:
    fox = "🦊".encode()
    await scheduler.step(new=(opened(0, "u"),))
    for index, byte in enumerate(fox):
        batch = StepTokens(SCHEDULER, 10 + index, (), pack_ids([0]), pack_ids([index]), pack_ids([0, 1]),
                           pack_ids([byte]))  # fmt: skip
        wire.send(SUBJECTS.detokenize(wire.actor.instance), batch)
        await wire.settle()
    assert [text for _, text, _ in text_rows(wire, "u")] == ["", "", "", "🦊"]


async def test_a_stop_string_across_tokens_ends_the_text_and_tells_the_scheduler(
    wire: Wire, scheduler: Scheduler
) -> None:
    await scheduler.step((0, 0, "one EN"), new=(opened(0, "u", stop=("END",), attempt=2),))
    assert text_of(wire, "u") == "one "
    await scheduler.step((0, 6, "D more"))
    assert text_of(wire, "u") == "one "
    assert ends(wire) == [("u", "stop", 7)]
    (message,) = wire.said(SUBJECTS.stop(SCHEDULER))
    assert to_scheduler.decode(message.payload) == StopMatched((("u", 0, 2),))
    await scheduler.step((0, 12, "late"))
    assert len(ends(wire)) == 1


async def test_what_looked_like_a_stop_string_is_given_in_the_end(wire: Wire, scheduler: Scheduler) -> None:
    await scheduler.step((0, 0, "one EN"), new=(opened(0, "u", stop=("END",)),), finished={0: "length"})
    assert text_of(wire, "u") == "one EN"
    assert ends(wire) == [("u", "length", 6)]


async def test_a_sequence_that_is_sent_on_gives_only_what_the_client_lacks(wire: Wire, scheduler: Scheduler) -> None:
    there = opened(0, "u", attempt=2, output_ids=ids("hello"), delivered_chars=3)
    await scheduler.step((0, 5, " you"), new=(there,))
    assert text_of(wire, "u") == "lo you"
    assert [row for row in text_rows(wire, "u") if row[2]] == [(5, " you", list(b" you"))]


async def test_a_stop_string_across_the_point_of_sending_on_is_found(wire: Wire, scheduler: Scheduler) -> None:
    there = opened(0, "u", attempt=2, output_ids=ids("one E"), delivered_chars=4, stop=("END",))
    await scheduler.step((0, 5, "ND two"), new=(there,))
    assert text_of(wire, "u") == ""
    assert ends(wire) == [("u", "stop", 7)]


async def test_a_later_attempt_takes_the_place_of_the_earlier_one(wire: Wire, scheduler: Scheduler) -> None:
    await scheduler.step((0, 0, "ab"), new=(opened(0, "u"),))
    await scheduler.step((1, 2, "c"), new=(opened(1, "u", attempt=2, output_ids=ids("ab"), delivered_chars=2),))
    await scheduler.step((0, 2, "c"), (1, 3, "d"))
    assert text_of(wire, "u") == "abcd"
    assert wire.statistics()["open_sequences"] == 1


async def test_every_sixteenth_batch_is_acknowledged(wire: Wire, scheduler: Scheduler) -> None:
    heard = await wire.connection.subscribe("inbox.wire.batch")
    scheduler.send((0, 0, "x"), new=(opened(0, "u"),), reply="inbox.wire.batch")
    for index in range(1, 2 * ACKNOWLEDGED_EVERY):
        scheduler.send((0, index, "x"), reply="inbox.wire.batch")
    await wire.settle()
    numbers = [int(message.payload) for message in wire.heard if message.subscription == heard.number]
    assert numbers == [ACKNOWLEDGED_EVERY, 2 * ACKNOWLEDGED_EVERY]


async def test_an_abort_ends_all_choices_and_overtakes(wire: Wire, scheduler: Scheduler) -> None:
    await scheduler.step(new=(opened(0, "u"), opened(1, "u", choice=1), opened(2, "v")))
    await wire.abort("u")
    assert wire.statistics()["open_sequences"] == 1
    await wire.abort("w")
    await scheduler.step((0, 0, "late"), (3, 0, "later"), new=(opened(3, "w"),))
    assert (text_of(wire, "u"), text_of(wire, "w")) == ("", "")
    assert wire.statistics()["open_sequences"] == 1


async def test_an_abort_of_an_earlier_attempt_leaves_the_later_one(wire: Wire, scheduler: Scheduler) -> None:
    await scheduler.step(new=(opened(0, "u", attempt=2),))
    await wire.abort("u", b"1")
    await scheduler.step((0, 0, "here"))
    assert text_of(wire, "u") == "here"


@pytest.mark.parametrize("gone", [SCHEDULER, FRONTEND])
async def test_sequences_of_somebody_who_is_gone_are_dropped(wire: Wire, scheduler: Scheduler, gone: str) -> None:
    await scheduler.step(new=(opened(0, "u"),))
    await wire.announce(gone, StageState.GONE)
    assert wire.statistics()["open_sequences"] == 0


async def test_a_probe_tells_the_next_index(wire: Wire, scheduler: Scheduler) -> None:
    await scheduler.step((0, 0, "abc"), new=(opened(0, "u", choice=2, attempt=4),))
    answer = await wire.ask("probe", {"uids": ["u", "unknown"]})
    assert answer["sequences"] == {"u": [[2, 4, "running", 3]]}


async def test_a_drain_gives_back_what_is_open(wire: Wire, scheduler: Scheduler) -> None:
    await scheduler.step((0, 0, "ab"), new=(opened(0, "u"),))
    wire.actor.stop()
    await wire.settle()
    (lost,) = failures(wire, "u")
    assert (lost.code, lost.retryable) == ("lost", True)
