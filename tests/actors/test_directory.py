"""Who is there, by what was heard and when."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busllm.actors.clock import Timings
from busllm.actors.directory import Directory, Peer, PeerChange, PeerHealth, PeerNews
from busllm.messages.control import Announcement, StageState, Versions
from busllm.testing.looked_at import looked_at

NO_VERSIONS = Versions()
TIMINGS = Timings(suspect_s=2.0, gone_s=6.0, settle_s=1.0)


def said(
    state: StageState = StageState.READY, instance: str = "scheduler-0-aaaaaaaa", versions: Versions = NO_VERSIONS
) -> Announcement:
    return Announcement("scheduler", 0, instance, "here", 1, state, versions=versions)


def news(changes: list[PeerChange]) -> list[PeerNews]:
    return [change.news for change in changes]


@pytest.fixture
def directory() -> Directory:
    return Directory(Versions(model="m"), TIMINGS)


def names(directory: Directory, avoid: tuple[str, ...] = ()) -> list[str]:
    return [peer.instance for peer in directory.usable("scheduler", avoid)]


def test_a_peer_is_usable_from_ready_on(directory: Directory) -> None:
    assert PeerNews.READY not in news(directory.hear(said(StageState.STARTING), 0.0))
    assert names(directory) == []
    assert directory.why_unusable("scheduler") == "scheduler-0-aaaaaaaa is starting"
    assert PeerNews.READY in news(directory.hear(said(), 1.0))
    assert names(directory) == ["scheduler-0-aaaaaaaa"]
    assert directory.why_unusable("scheduler") is None


def test_silence_makes_a_peer_suspect_then_gone(directory: Directory) -> None:
    directory.hear(said(), 0.0)
    assert directory.tick(1.9) == []
    assert news(directory.tick(2.1)) == [PeerNews.SUSPECT]
    assert directory.tick(2.2) == [], "it is told once"
    assert names(directory) == []
    assert "silent" in (directory.why_unusable("scheduler") or "")
    (change,) = directory.tick(6.1)
    assert (change.news, change.peer.health) == (PeerNews.GONE, PeerHealth.GONE)
    assert directory.peers() == []
    assert directory.get("scheduler-0-aaaaaaaa") is None


def test_a_suspect_that_speaks_has_recovered(directory: Directory) -> None:
    directory.hear(said(), 0.0)
    directory.tick(3.0)
    assert PeerNews.RECOVERED in news(directory.hear(said(), 3.1))
    assert names(directory) == ["scheduler-0-aaaaaaaa"]
    assert directory.tick(5.0) == []


def test_the_last_word_of_a_peer_makes_it_gone_at_once(directory: Directory) -> None:
    directory.hear(said(), 0.0)
    assert news(directory.hear(said(StageState.GONE), 0.1)) == [PeerNews.GONE]
    assert directory.hear(said(StageState.GONE), 0.2) == [], "it is told once"
    assert names(directory) == []


def test_a_draining_peer_gets_no_new_work(directory: Directory) -> None:
    directory.hear(said(), 0.0)
    assert PeerNews.DRAINING in news(directory.hear(said(StageState.DRAINING), 0.5))
    assert names(directory) == []
    assert len(directory.peers()) == 1


def test_after_a_gap_nobody_is_blamed_and_nobody_used_before_it_is_heard_again(directory: Directory) -> None:
    directory.hear(said(), 0.0)
    directory.hear(said(instance="scheduler-1-bbbbbbbb"), 0.0)
    directory.resume(50.0)
    assert directory.tick(50.5) == []
    assert names(directory) == []
    directory.hear(said(), 50.6)
    assert names(directory) == ["scheduler-0-aaaaaaaa"]
    gone = directory.tick(50.0 + TIMINGS.gone_s + 0.5)
    assert (PeerNews.GONE, "scheduler-1-bbbbbbbb") in [(change.news, change.peer.instance) for change in gone]


def test_a_doubted_peer_is_not_used_until_it_speaks(directory: Directory) -> None:
    directory.hear(said(), 0.0)
    directory.doubt("scheduler-0-aaaaaaaa")
    assert names(directory) == []
    directory.hear(said(), 0.5)
    assert names(directory) == ["scheduler-0-aaaaaaaa"]


@pytest.mark.parametrize(
    ("versions", "is_usable"),
    [
        (Versions(model="m"), True),
        (Versions(model=""), True),  # it has none, or has not loaded it
        (Versions(model="other"), False),
        (Versions(protocol=2, model="m"), False),
        (Versions(package="9.9", topology="other", model="m"), True),
    ],
)
def test_only_protocol_and_model_must_agree(directory: Directory, versions: Versions, is_usable: bool) -> None:
    directory.hear(said(versions=versions), 0.0)
    assert bool(names(directory)) == is_usable
    assert len(directory.peers()) == 1, "it is shown all the same"
    if not is_usable:
        assert "protocol" in (directory.why_unusable("scheduler") or "")


def test_avoided_peers_are_taken_when_there_is_no_other(directory: Directory) -> None:
    directory.hear(said(), 0.0)
    assert names(directory, avoid=("scheduler-0-aaaaaaaa",)) == ["scheduler-0-aaaaaaaa"]
    directory.hear(said(instance="scheduler-1-bbbbbbbb"), 0.0)
    assert names(directory, avoid=("scheduler-0-aaaaaaaa",)) == ["scheduler-1-bbbbbbbb"]


# ---------------------------------------------------------------- many peers


def by_definition(directory: Directory, kind: str) -> list[str]:
    return [peer.instance for peer in directory.peers() if peer.kind == kind and directory.is_usable(peer)]


def test_who_is_usable_is_kept_while_heartbeats_change_nothing_about_it(directory: Directory) -> None:
    for number in range(100):
        directory.hear(said(instance=f"scheduler-{number}-aaaaaaaa"), 0.0)
    assert len(names(directory)) == 100
    for number in range(100):
        directory.hear(said(instance=f"scheduler-{number}-aaaaaaaa"), 0.5)
    with looked_at(Peer) as seen:
        directory.usable("scheduler")
    assert len(seen) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["ready", "draining", "gone", "alien", "doubt", "other"]),
                          st.sampled_from([0.0, 0.1, 2.5])), max_size=30))  # fmt: skip
def test_who_is_usable_is_right_after_every_change(happenings: list[tuple[int, str, float]]) -> None:
    directory, now = Directory(Versions(model="m"), TIMINGS), 0.0
    for number, happening, pause_s in happenings:
        now += pause_s
        instance = f"scheduler-{number}-aaaaaaaa"
        match happening:
            case "ready":
                directory.hear(said(instance=instance), now)
            case "draining" | "gone":
                directory.hear(said(StageState(happening), instance), now)
            case "alien":
                directory.hear(said(instance=instance, versions=Versions(model="another")), now)
            case "other":
                directory.hear(msgspec.structs.replace(said(instance=instance), kind="tokenizer"), now)
            case "doubt":
                directory.doubt(instance)
        for kind in ("scheduler", "tokenizer"):
            assert [peer.instance for peer in directory.usable(kind)] == by_definition(directory, kind)
        if pause_s:
            directory.tick(now)
        if pause_s == 0.1:
            directory.resume(now)
        assert names(directory) == by_definition(directory, "scheduler")
