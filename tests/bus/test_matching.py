"""Subjects, patterns, and the tree that matches them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busllm.bus.matching import MAX_SUBJECT_BYTES, SubjectTree, check_pattern, check_subject
from busllm.errors import BadSubject

TOKENS = st.sampled_from(["a", "b", "c"])
SUBJECTS = st.lists(TOKENS, min_size=1, max_size=4).map(".".join)
PATTERNS = st.tuples(
    st.lists(st.sampled_from(["a", "b", "*"]), min_size=0, max_size=3), st.sampled_from(["a", "*", ">"])
).map(lambda parts: ".".join([*parts[0], parts[1]]))


def matches(pattern: list[str], subject: list[str]) -> bool:
    """The rule, spelt out."""
    if not pattern or not subject:
        return not pattern and not subject
    if pattern == [">"]:
        return True
    return pattern[0] in ("*", subject[0]) and matches(pattern[1:], subject[1:])


@given(st.lists(PATTERNS, max_size=8), SUBJECTS)
def test_the_tree_finds_exactly_the_patterns_that_match(patterns: list[str], subject: str) -> None:
    tree: SubjectTree[int] = SubjectTree()
    for number, pattern in enumerate(patterns):
        tree.add(pattern, number)
    expected = [n for n, pattern in enumerate(patterns) if matches(pattern.split("."), subject.split("."))]
    assert sorted(tree.match(subject)) == expected


@given(st.lists(PATTERNS, max_size=8))
def test_what_was_added_and_removed_leaves_an_empty_tree(patterns: list[str]) -> None:
    tree: SubjectTree[int] = SubjectTree()
    for number, pattern in enumerate(patterns):
        tree.add(pattern, number)
    for number, pattern in enumerate(patterns):
        tree.remove(pattern, number)
    assert not tree._children and not tree._values


def test_removing_what_is_not_there_is_an_error() -> None:
    tree: SubjectTree[int] = SubjectTree()
    tree.add("a.b", 1)
    for pattern, value in (("a.b", 2), ("a", 1), ("a.*", 1)):
        with pytest.raises(KeyError):
            tree.remove(pattern, value)


def test_a_subject_may_be_as_long_as_the_limit_and_no_longer() -> None:
    check_subject("x" * MAX_SUBJECT_BYTES)
    check_subject("é" * (MAX_SUBJECT_BYTES // 2))
    with pytest.raises(BadSubject, match="1025 bytes"):
        check_subject("x" * (MAX_SUBJECT_BYTES + 1))
    with pytest.raises(BadSubject):
        check_pattern("é" * (MAX_SUBJECT_BYTES // 2) + ".>", None)


@given(PATTERNS)
def test_every_well_formed_pattern_is_accepted(pattern: str) -> None:
    check_pattern(pattern, "group")
