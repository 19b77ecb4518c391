"""Finding stop strings in text that comes in pieces.

Owns: `StopMatcher`: which text is certain, which may still become a stop string, and where one was found.
Does not know: tokens.
"""

from __future__ import annotations

from typing import NamedTuple


class Certain(NamedTuple):
    """What is known after a piece of text.

    Attributes:
        text: may be delivered: no stop string can begin in it.
        stopped: a stop string was found; `text` ends before it.
    """

    text: str
    stopped: bool


class StopMatcher:
    """Looks for several stop strings at once, character by character.

    The match that ends first wins, so that the answer does not depend on how the text was cut into pieces; of several
    that end at the same character, the longest. Text is held back only while it is the beginning of a stop string.
    The search is that of Knuth, Morris and Pratt ("Fast pattern matching in strings", SIAM J. Comput. 6, 1977), one
    automaton per string: constant time per character however long the strings are.

    Args:
        stop: non-empty strings.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._patterns = tuple((text, _fallbacks(text)) for text in stop)
        self._num_matched = [0] * len(stop)
        self._held = ""

    def push(self, text: str) -> Certain:
        """Takes the next piece. After a match nothing more may be pushed."""
        for index, letter in enumerate(text):
            num_stop_letters = self._advance(letter)
            if num_stop_letters:
                seen = self._held + text[: index + 1]
                self._held = ""
                return Certain(seen[: len(seen) - num_stop_letters], True)
        seen = self._held + text
        num_held = max(self._num_matched, default=0)
        cut = len(seen) - num_held
        self._held = seen[cut:]
        return Certain(seen[:cut], False)

    def flush(self) -> str:
        """The held text, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, letter: str) -> int:
        """Moves every automaton on; returns the length of the longest string that ends here, or 0."""
        longest = 0
        for number, (pattern, fallbacks) in enumerate(self._patterns):
            matched = self._num_matched[number]
            while matched and pattern[matched] != letter:
                matched = fallbacks[matched - 1]
            if pattern[matched] == letter:
                matched += 1
            self._num_matched[number] = matched
            if matched == len(pattern):
                longest = max(longest, matched)
        return longest


def _fallbacks(pattern: str) -> list[int]:
    """For each beginning of the pattern: the length of its longest proper suffix that is also its prefix."""
    lengths = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = lengths[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        lengths[index] = length
    return lengths
