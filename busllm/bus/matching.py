"""Subjects and patterns: which are well formed, and which pattern matches which subject.

Owns: the checks that every bus makes before it sends anything, and `SubjectTree`, the index from patterns to whoever
subscribed to them.
Does not know: connections, payloads, the names of busllm's own subjects (`bus/subjects.py`).
Next on the path: `bus/memory.py` routes with the tree; `bus/nats.py` uses the checks alone, its server routes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Generic, TypeVar

from busllm.errors import BadSubject

MAX_SUBJECT_BYTES = 1024  # subject and reply share one control line, of which a NATS server takes 4,096 bytes
_MAX_UTF8_BYTES_PER_CHARACTER = 4
_UNENCODABLE = "\ud800-\udfff"  # lone surrogates have no UTF-8 form
_CHARACTER = rf"[^\s\x00-\x1f\x7f.*>{_UNENCODABLE}]"
_SUBJECT = re.compile(rf"{_CHARACTER}+(?:\.{_CHARACTER}+)*")
_PATTERN = re.compile(rf"(?:(?:\*|{_CHARACTER}+)(?:\.(?:\*|{_CHARACTER}+))*(?:\.>)?|>)")
_QUEUE_GROUP = re.compile(rf"{_CHARACTER}+")

T = TypeVar("T")


def check_subject(subject: str) -> None:
    """Checks a subject to publish on.

    Raises:
        BadSubject: it is empty or too long, or has an empty token, white space, a control character or a wildcard.
    """
    if _SUBJECT.fullmatch(subject) is None:
        raise BadSubject(
            f"{subject[:80]!r} is not a subject to publish on: tokens joined by dots, without white space, control "
            "characters, '*' and '>'."
        )
    _check_length(subject)


def check_pattern(pattern: str, queue_group: str | None) -> None:
    """Checks a pattern, and a queue group, to subscribe with.

    Raises:
        BadSubject: the pattern is empty or too long, has an empty token, white space, a control character, a wildcard
            inside a token, or a '>' before the end; or the queue group is not a single token.
    """
    if _PATTERN.fullmatch(pattern) is None:
        raise BadSubject(
            f"{pattern[:80]!r} is not a pattern: tokens joined by dots, where '*' stands for one token and a final '>' "
            "for the rest."
        )
    if queue_group is not None and _QUEUE_GROUP.fullmatch(queue_group) is None:
        raise BadSubject(f"{queue_group[:80]!r} is not a queue group: it must be one token.")
    _check_length(pattern)


def _check_length(subject: str) -> None:
    if len(subject) * _MAX_UTF8_BYTES_PER_CHARACTER <= MAX_SUBJECT_BYTES:
        return  # the common case, without encoding anything
    num_bytes = len(subject.encode())
    if num_bytes > MAX_SUBJECT_BYTES:
        raise BadSubject(f"A subject of {num_bytes} bytes is over the limit of {MAX_SUBJECT_BYTES} bytes.")


class SubjectTree(Generic[T]):
    """Values filed under patterns, found by subject in time that grows with the tokens and not with the patterns.

    A tree of tokens: every node has children by token ('*' and '>' among them) and the values whose pattern ends there.
    """

    __slots__ = ("_children", "_values")

    def __init__(self) -> None:
        self._children: dict[str, SubjectTree[T]] = {}
        self._values: list[T] = []

    def add(self, pattern: str, value: T) -> None:
        """Files `value` under `pattern`, which `check_pattern` has accepted."""
        node = self
        for token in pattern.split("."):
            node = node._children.setdefault(token, SubjectTree())
        node._values.append(value)

    def remove(self, pattern: str, value: T) -> None:
        """Takes `value` out again, and the branches that hold nothing else.

        Raises:
            KeyError: it is not filed under that pattern.
        """
        self._remove(pattern.split("."), 0, value)

    def _remove(self, tokens: list[str], depth: int, value: T) -> None:
        if depth == len(tokens):
            if value not in self._values:
                raise KeyError(".".join(tokens))
            self._values.remove(value)
            return
        child = self._children[tokens[depth]]
        child._remove(tokens, depth + 1, value)
        if not child._values and not child._children:
            del self._children[tokens[depth]]

    def match(self, subject: str) -> list[T]:
        """The values of all patterns that match `subject`; within one pattern in the order of `add`."""
        return list(self._match(subject.split("."), 0))

    def _match(self, tokens: list[str], depth: int) -> Iterator[T]:
        if depth == len(tokens):
            yield from self._values
            return
        rest = self._children.get(">")
        if rest is not None:
            yield from rest._values
        for token in (tokens[depth], "*"):
            child = self._children.get(token)
            if child is not None:
                yield from child._match(tokens, depth + 1)
