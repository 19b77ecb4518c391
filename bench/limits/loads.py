"""The rows of the comparison as steps: how fast the machine's limits would let each of them be.

Owns: of which steps a row consists, in the least that it needs, and what comes out of them.
Does not know: how fast a machine is, what was measured.

A row is taken as if all its clients began together and every step had all of them: prompts in one step, then a token
for each. HTTP, bus, sampling and whatever passes between two steps take nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from bench.compare.rows import Figure
from bench.limits.work import Rows

PROMPT, ANSWER = 100, 128
SPREAD_PROMPT, SPREAD_ANSWER = 250, 125  # on average, of 100 to 400 and 50 to 200
SHARED, SHARED_ANSWER = 1000, 16


class Load(msgspec.Struct, frozen=True):
    """One row.

    Attributes:
        steps: how often, and which.
        amount: what comes out of all of them, in the unit of `figure` times a second.
        figure: what the comparison says of the row.
    """

    steps: tuple[tuple[int, list[Rows]], ...]
    amount: int
    figure: Figure

    def at_best(self, bound_s: Callable[[list[Rows]], float]) -> float:
        """What the limits of each step allow, per second."""
        return self.amount / sum(times * bound_s(rows) for times, rows in self.steps)


def _clients(count: int, prompt: int, answer: int) -> Load:
    prompts = [Rows(n, 0, prompt) for n in range(count)]
    decodes = [Rows(n, prompt + answer // 2, 1) for n in range(count)]
    return Load(((1, prompts), (answer - 1, decodes)), count * answer, Figure.OUTPUT)


def _shared(*, cold: bool) -> Load:
    begin = SHARED + PROMPT
    decodes = [Rows(n, begin + SHARED_ANSWER // 2, 1) for n in range(8)]
    if not cold:  # of a prompt that is cached only the last token is computed
        return Load(((8 * SHARED_ANSWER, decodes),), 64, Figure.REQUESTS)
    prompts = [Rows(0, 0, begin), *(Rows(n, SHARED, PROMPT) for n in range(1, 64))]
    return Load(((1, prompts), (8 * (SHARED_ANSWER - 1), decodes)), 64, Figure.REQUESTS)


LOADS: Mapping[str, Load] = {
    **{f"c{count}": _clients(count, PROMPT, ANSWER) for count in (1, 8, 32)},
    "c64-spread": _clients(64, SPREAD_PROMPT, SPREAD_ANSWER),
    "shared-cold": _shared(cold=True),
    "shared-warm": _shared(cold=False),
}
