"""Messages larger than the bus carries: whole and in order, or not at all."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busllm.errors import MalformedMessage
from busllm.messages.parts import MAX_PARTS, Joiner, Part, split

LIMIT = 4096
PAYLOAD = bytes(range(256)) * 64


def parts_of(payload: bytes, max_payload_bytes: int = LIMIT) -> list[Part]:
    return [msgspec.msgpack.decode(piece, type=Part) for piece in split(payload, max_payload_bytes)]


def joined(joiner: Joiner, parts: list[Part]) -> list[bytes]:
    return [whole for part in parts if (whole := joiner.add(part)) is not None]


def test_what_fits_goes_as_it_is() -> None:
    assert list(split(b"x" * LIMIT, LIMIT)) == [b"x" * LIMIT]


def test_no_piece_is_larger_than_the_limit_and_all_together_are_the_payload() -> None:
    pieces = list(split(PAYLOAD, LIMIT))
    assert all(len(piece) <= LIMIT for piece in pieces)
    assert joined(Joiner(), parts_of(PAYLOAD)) == [PAYLOAD]


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=1, max_size=20_000), st.integers(600, 3000))
def test_any_payload_survives_any_limit(payload: bytes, limit: int) -> None:
    if len(payload) > limit:
        assert joined(Joiner(), parts_of(payload, limit)) == [payload]


def test_a_limit_that_leaves_no_room_is_an_error() -> None:
    with pytest.raises(MalformedMessage, match="too small"):
        list(split(b"x" * 600, 512))


@pytest.mark.parametrize("lost", range(5))
def test_a_lost_part_loses_its_message_and_no_other(lost: int) -> None:
    parts, joiner = parts_of(PAYLOAD), Joiner()
    assert len(parts) == 5
    assert joined(joiner, parts[:lost] + parts[lost + 1 :]) == []
    assert joined(joiner, parts_of(PAYLOAD)) == [PAYLOAD]


def test_parts_out_of_order_or_twice_are_no_message() -> None:
    first, second, *rest = parts_of(PAYLOAD)
    assert joined(Joiner(), [second, first, *rest]) == []
    assert joined(Joiner(), [first, second, second, *rest]) == []
    assert joined(Joiner(), [first, first, second, *rest]) == []


def test_messages_of_several_senders_may_be_mixed() -> None:
    one, other = parts_of(PAYLOAD), parts_of(PAYLOAD[::-1])
    mixed = [part for pair in zip(one, other, strict=True) for part in pair]
    assert joined(Joiner(), mixed) == [PAYLOAD, PAYLOAD[::-1]]


def test_unfinished_messages_are_bounded_and_the_oldest_goes_first() -> None:
    old, new = parts_of(PAYLOAD), parts_of(PAYLOAD[::-1])
    joiner = Joiner(max_open_bytes=len(PAYLOAD))
    assert joined(joiner, old[:-1]) == []
    assert joined(joiner, new[:-1]) == []
    assert joined(joiner, [old[-1]]) == []
    assert joined(joiner, [new[-1]]) == [PAYLOAD[::-1]]


def test_beginnings_without_an_end_do_not_add_up() -> None:
    joiner, (first, second, *rest) = Joiner(max_open_messages=3), parts_of(PAYLOAD)
    assert joiner.add(first) is None
    for number in range(2):
        joiner.add(Part(f"begun-{number}", 0, 2, b"x"))
    assert joiner.add(second) is None, "it is not the one that was silent longest"
    joiner.add(Part("begun-2", 0, 2, b"x"))
    assert joiner.add(Part("begun-0", 1, 2, b"y")) is None, "forgotten"
    assert joiner.add(Part("begun-1", 1, 2, b"y")) == b"xy"
    assert joined(joiner, rest) == [PAYLOAD]


def test_many_small_parts_are_bounded_by_their_number() -> None:
    joiner = Joiner(max_open_parts=4)
    for key in ("old", "new"):
        for number in range(2):
            joiner.add(Part(key, number, 3, b"x"))
    joiner.add(Part("newest", 0, 2, b"x"))
    assert joiner.add(Part("old", 2, 3, b"x")) is None, "forgotten"
    assert joiner.add(Part("new", 2, 3, b"x")) == b"xxx"


def test_an_empty_part_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="empty"):
        Joiner().add(Part("key", 0, 2, b""))


def test_a_payload_of_too_many_parts_is_refused_before_the_first_is_sent() -> None:
    with pytest.raises(MalformedMessage, match="4097 parts"):
        next(split(b"x" * (MAX_PARTS + 1), 513))


def test_finished_messages_take_no_room() -> None:
    joiner = Joiner(max_open_bytes=len(PAYLOAD), max_open_messages=1, max_open_parts=5)
    for _ in range(100):
        assert joined(joiner, parts_of(PAYLOAD)) == [PAYLOAD]


@pytest.mark.parametrize(("number", "count"), [(-1, 3), (3, 3), (0, 0), (0, MAX_PARTS + 1), (5, 2)])
def test_impossible_numbers_are_malformed(number: int, count: int) -> None:
    with pytest.raises(MalformedMessage, match="impossible"):
        Joiner().add(Part("key", number, count, b"x"))
