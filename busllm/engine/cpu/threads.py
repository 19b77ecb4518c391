"""How many cores a step uses.

Owns: the agreement between torch's number of threads and numba's, and the choice between all cores and one.
Does not know: what is computed; a row's bits do not depend on it.
Next on the path: `cpu_decoder.py`.

A step has hundreds of short parallel pieces. On cores of its own two threads are faster than one. Beside processes that
never rest, a thread that has lost its core holds up every piece, and one thread alone can be several times faster.
Which of the two it is changes from second to second, so it is measured; and since steps are late for many reasons (the
first ones, which touch new memory, always), the fastest of the latest are compared, and one thread must win clearly.
"""

from __future__ import annotations

from collections import deque

import numba
import torch

TRIAL_EVERY = 32  # steps after which the slower choice is tried again
RARE_TRIAL_EVERY = 128  # the same, when it was slower by more than half
MANY_ROWS = 64  # whose pieces are long: they always get all threads, and nobody waits for a trial
FIRST_STEPS = 4  # in which both are tried in turn
RECENT = 5  # steps of which the fastest counts
CLEARLY = 0.8  # of the time of all cores, that one core may take to be chosen


def num_threads() -> int:
    """What torch uses (`OMP_NUM_THREADS`, else every core), if numba has so many."""
    return min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))


class ThreadChoice:
    """Chooses a number of threads for each step.

    Args:
        most: threads that there are.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._times_s: dict[tuple[int, int], deque[float]] = {}  # (size class, threads) → latest
        self._steps: dict[int, int] = {}  # size class → steps so far

    def choose(self, num_rows: int) -> int:
        """Threads for a step of so many rows: all, or one where that has clearly been faster lately."""
        if self._most == 1 or num_rows >= MANY_ROWS:
            return self._most
        size = num_rows.bit_length()
        step = self._steps[size] = self._steps.get(size, 0) + 1
        alone, together = (self._fastest_s(size, threads) for threads in (1, self._most))
        if alone is None or together is None or step <= FIRST_STEPS:
            return 1 if step % 2 == 0 else self._most
        better, other = (1, self._most) if alone < CLEARLY * together else (self._most, 1)
        is_close = max(alone, together) < 1.5 * min(alone, together)
        return other if step % (TRIAL_EVERY if is_close else RARE_TRIAL_EVERY) == 0 else better

    def took(self, num_rows: int, threads: int, duration_s: float) -> None:
        """Learns how long a step took."""
        self._times_s.setdefault((num_rows.bit_length(), threads), deque(maxlen=RECENT)).append(duration_s)

    def _fastest_s(self, size: int, threads: int) -> float | None:
        times_s = self._times_s.get((size, threads))
        return min(times_s) if times_s else None
