"""The right word that a misspelt one was most likely meant to be.

Owns: the measure of likeness, for keys, values, stage names, flags and commands alike.
Does not know: where the words are from.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MIN_BEGINNING = 3  # letters by which a word may be known from its beginning


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed word that is most like `word` (upper and lower case are alike), or None when none is near."""
    by_lower_case = {candidate.lower(): candidate for candidate in allowed}
    lower = word.lower()
    matches = difflib.get_close_matches(lower, list(by_lower_case), n=1, cutoff=0.6)
    if not matches and len(lower) >= _MIN_BEGINNING:
        matches = [candidate for candidate in by_lower_case if candidate.startswith(lower)]
    return by_lower_case[matches[0]] if matches else None
