"""CPU time of repeated calls.

Owns: the repetition: the smallest of a few runs, since what else a machine does only adds.
Does not know: what is called.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

NUM_RUNS = 5


def cpu_us(call: Callable[[], object], num_calls: int) -> float:
    """Microseconds of this thread's CPU time per call; the call has been made once before."""
    call()
    gc.collect()
    gc.disable()
    try:
        return min(_one_run_s(call, num_calls) for _ in range(NUM_RUNS)) / num_calls * 1e6
    finally:
        gc.enable()


def _one_run_s(call: Callable[[], object], num_calls: int) -> float:
    began_s = time.thread_time()
    for _ in range(num_calls):
        call()
    return time.thread_time() - began_s
