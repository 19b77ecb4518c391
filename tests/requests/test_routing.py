"""Who gets a request, and what was aborted lately."""

from __future__ import annotations

from collections import Counter

from busllm.actors.directory import Peer
from busllm.messages.control import Announcement, StageState
from busllm.requests.routing import pick
from busllm.requests.tombstones import Tombstones


def peer(name: str, requests: float | None = None) -> Peer:
    load = {} if requests is None else {"requests": requests}
    return Peer(Announcement("scheduler", 0, name, "here", 1, StageState.READY, load=load), 0.0)


def picked(peers: list[Peer], in_flight: dict[str, int] | None = None) -> str:
    chosen = pick(peers, in_flight or {})
    assert chosen is not None
    return chosen.instance


def test_nobody_is_picked_of_nobody() -> None:
    assert pick([], {}) is None


def test_the_least_loaded_by_its_own_word_is_picked() -> None:
    assert picked([peer("a", 3), peer("b", 1), peer("c", 2)]) == "b"
    assert picked([peer("a", 3), peer("b")]) == "b"


def test_what_was_sent_since_counts_before_the_peer_can_say_so() -> None:
    assert picked([peer("a", 0), peer("b", 2)], {"a": 5}) == "b"
    assert picked([peer("a", 4), peer("b", 0)], {"a": 1, "b": 3}) == "b"


def test_a_burst_is_spread() -> None:
    peers = [peer("a", 0), peer("b", 0), peer("c", 0)]
    in_flight: Counter[str] = Counter()
    for _ in range(30):
        in_flight[picked(peers, in_flight)] += 1
    assert set(in_flight.values()) == {10}


def test_equals_are_drawn_by_lot() -> None:
    assert {picked([peer("a", 1), peer("b", 1)]) for _ in range(200)} == {"a", "b"}


def test_an_abort_covers_its_attempt_and_earlier_ones() -> None:
    tombstones = Tombstones()
    tombstones.bury("u", 2)
    assert [tombstones.covers("u", attempt) for attempt in (1, 2, 3)] == [True, True, False]
    assert not tombstones.covers("v", 1)


def test_a_lower_abort_takes_nothing_back_and_an_empty_one_covers_all() -> None:
    tombstones = Tombstones()
    tombstones.bury("u", 5)
    tombstones.bury("u", 2)
    assert tombstones.covers("u", 5)
    tombstones.bury("u", None)
    tombstones.bury("u", 1)
    assert tombstones.covers("u", 99)


def test_the_oldest_aborts_are_forgotten_and_one_that_comes_again_is_young() -> None:
    tombstones = Tombstones(max_entries=2)
    for uid in ("a", "b", "a", "c"):
        tombstones.bury(uid, None)
    assert [tombstones.covers(uid, 1) for uid in ("a", "b", "c")] == [True, False, True]
