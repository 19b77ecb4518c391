"""When an owner looks at which request."""

from __future__ import annotations

from busllm.requests.agenda import Agenda


def test_what_is_due_comes_in_the_order_of_its_moments() -> None:
    agenda = Agenda()
    for uid, at in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        agenda.note(uid, at)
    assert agenda.take(0.9, 10) == []
    assert agenda.take(2.0, 10) == ["a", "b"]
    assert agenda.take(9.0, 10) == ["c"]
    assert agenda.take(9.0, 10) == []


def test_a_later_note_takes_the_place_of_an_earlier_one() -> None:
    agenda = Agenda()
    agenda.note("a", 1.0)
    agenda.note("a", 5.0)
    agenda.note("b", 5.0)
    agenda.note("b", 1.0)
    assert agenda.take(1.0, 10) == ["b"]
    assert agenda.take(4.9, 10) == []
    assert agenda.take(5.0, 10) == ["a"]
    assert agenda.take(9.0, 10) == []


def test_a_moment_that_is_noted_again_counts_once() -> None:
    agenda = Agenda()
    for at in (1.0, 2.0, 1.0, 1.0):
        agenda.note("a", at)
    assert agenda.take(3.0, 10) == ["a"]
    assert agenda.take(3.0, 10) == []


def test_what_is_over_the_limit_stays_due_before_what_is_noted_anew() -> None:
    agenda = Agenda()
    for number in range(5):
        agenda.note(f"u{number}", float(number))
    assert agenda.take(9.0, 3) == ["u0", "u1", "u2"]
    agenda.note("u0", 9.0)
    assert agenda.take(9.0, 3) == ["u3", "u4", "u0"]


def test_all_are_due_when_something_has_changed_for_all_and_the_forgotten_are_not() -> None:
    agenda = Agenda()
    for uid, at in (("b", 50.0), ("gone", 1.0), ("a", 70.0)):
        agenda.note(uid, at)
    agenda.forget("gone")
    agenda.note_all(2.0)
    assert len(agenda) == 2
    assert agenda.take(2.0, 10) == ["a", "b"]
    assert agenda.take(99.0, 10) == []
