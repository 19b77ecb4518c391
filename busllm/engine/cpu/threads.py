"""How many cores a step uses.

Owns: the agreement between torch's number of threads and numba's, and the choice how much of a step one core does
alone.
Does not know: what is computed; a row's bits do not depend on it.
Next on the path: `cpu_decoder.py`.

(Steps whose rows are many are shared by rows, and nothing is chosen: `row_shares.py`.)

A step has hundreds of short parallel pieces, each of which ends when the last thread has done its part. On cores of
its own two threads are faster than one; a thread that has lost its core holds up every piece. There are always others
who want a core when a step begins: they carry the last step's tokens to their readers. So with few rows the first
layers may be done sooner by one core, while the others are busy, and the rest by all; beside processes that never rest
one core may be faster throughout. It changes from second to second, so it is measured; and since steps are late for
many reasons (the first ones, which touch new memory, always), the fastest of the latest are compared.
"""

from __future__ import annotations

from collections import deque

import numba
import numpy as np
import torch
from numba import njit, prange, types

SHARES = (0.0, 0.25, 0.5, 1.0)  # of the layers that one core does before the others join
WORTH = (1.0, 1.05, 1.05, 1.2)  # what a share's time counts for: it must win by so much against all cores at once
TRIAL_EVERY = 32  # steps after which one of the other choices is tried again
RARE_TRIALS = 4  # the one that was slower by more than half only at each so many of its turns
MANY_ROWS = 64  # whose pieces are long: they always get all threads, and nobody waits for a trial
FIRST_STEPS = 2 * len(SHARES)  # in which all are tried in turn
RECENT = 5  # steps of which the fastest counts


def num_threads() -> int:
    """What torch uses (`OMP_NUM_THREADS`, else every core), if numba has so many."""
    return min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))


_gettid = types.ExternalFunction("gettid", types.int32())


def thread_ids(num_threads: int) -> list[int]:
    """The kernel's ids of the threads that share a parallel loop of this thread, itself among them."""
    ids = np.zeros(num_threads, np.int64)
    numba.set_num_threads(num_threads)
    _write_ids(ids)
    return sorted(set(ids.tolist()))


@njit(nogil=True, cache=True, parallel=True)
def _write_ids(ids):
    """Each thread its own; with as many places as threads each has one."""
    for index in prange(len(ids)):
        ids[index] = _gettid()


class ThreadChoice:
    """Chooses for each step how much of it one core does alone.

    Args:
        most: threads that there are.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._times_s: dict[tuple[int, float], deque[float]] = {}  # (size class, share) → latest
        self._steps: dict[int, int] = {}  # size class → steps so far

    def choose(self, num_rows: int) -> float:
        """Which share of a step of so many rows one core does first: one of `SHARES`."""
        if self._most == 1:
            return 1.0
        if num_rows >= MANY_ROWS:
            return 0.0
        size = num_rows.bit_length()
        step = self._steps[size] = self._steps.get(size, 0) + 1
        if step <= FIRST_STEPS:
            return SHARES[step % len(SHARES)]
        times_s = {share: self._fastest_s(size, share) for share in SHARES}
        best = min(SHARES, key=lambda share: times_s[share] * WORTH[SHARES.index(share)])
        if step % TRIAL_EVERY:
            return best
        turn = step // TRIAL_EVERY
        others = [share for share in SHARES if share != best]
        other = others[turn % len(others)]
        is_close = times_s[other] < 1.5 * times_s[best]
        return other if is_close or turn // len(others) % RARE_TRIALS == 0 else best

    def took(self, num_rows: int, share: float, duration_s: float) -> None:
        """Learns how long a step took."""
        self._times_s.setdefault((num_rows.bit_length(), share), deque(maxlen=RECENT)).append(duration_s)

    def _fastest_s(self, size: int, share: float) -> float:
        return min(self._times_s.get((size, share), (0.0,)))
