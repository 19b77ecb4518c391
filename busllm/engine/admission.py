"""How many pages a sequence is expected to need, and whether the pool has them.

Owns: the estimate of an answer's length and the rule of admission.
Does not know: slots, order, retraction: what happens when the estimate was too low (`engine/planner.py`).

The rule. A waiting sequence is admitted when the pages that can be given out cover, at once, what every running
sequence is still expected to take and what it is expected to need itself beyond its cached prefix. Reserving
`max_tokens` would leave most of the pool idle, since most answers end earlier; counting only the prompt would fill it
and end in retractions. The expected length of an answer is the moving average of the answers so far; a sequence that
has outlived it is expected to go on for a quarter of what it has; never more than its own limit.
"""

from __future__ import annotations

from collections.abc import Iterable

from busllm.engine.live_sequence import LiveSequence
from busllm.engine.page_tables import PageTables, PrefixMatch

_MEMORY = 32  # answers that the moving average remembers


class ExpectedLength:
    """The estimate.

    Args:
        initial_tokens: length of an answer before any was seen.
    """

    def __init__(self, initial_tokens: int) -> None:
        self._average_tokens = float(initial_tokens)

    def observe(self, num_output_tokens: int) -> None:
        """An answer has ended with so many tokens."""
        self._average_tokens += (num_output_tokens - self._average_tokens) / _MEMORY

    def total_tokens(self, seq: LiveSequence) -> int:
        """Positions, prompt included, that a sequence is expected to reach."""
        generated = seq.num_output_tokens
        expected = max(int(self._average_tokens), generated + generated // 4 + 1)
        return seq.num_prompt_tokens + min(expected, seq.max_output_tokens)


class AdmissionBudget:
    """What can still be promised in one plan. Made once per plan, in O(running).

    Args:
        tables: the pool.
        expected: the estimate.
        running: sequences that have been promised pages.
    """

    def __init__(self, tables: PageTables, expected: ExpectedLength, running: Iterable[LiveSequence]) -> None:
        self._tables = tables
        self._expected = expected
        self._promised_pages = sum(max(0, self._need(seq) - len(seq.table)) for seq in running)

    def _need(self, seq: LiveSequence) -> int:
        """Pages in the end. An estimate above the pool is cut: alone, the sequence may have all of it."""
        tokens = max(seq.num_tokens, self._expected.total_tokens(seq))
        return min(self._tables.pages_for(tokens), self._tables.pool.num_pages)

    def fits(self, seq: LiveSequence, match: PrefixMatch) -> bool:
        """Whether a waiting sequence may be admitted."""
        available = self._tables.num_available - match.num_unused - self._promised_pages
        return self._need(seq) - match.num_pages <= available

    def took(self, num_pages: int) -> None:
        """A sequence has got so many of the pages that it was promised."""
        self._promised_pages -= num_pages

    def admitted(self, seq: LiveSequence) -> None:
        """A sequence has been admitted and its prefix locked."""
        self._promised_pages += max(0, self._need(seq) - len(seq.table))
