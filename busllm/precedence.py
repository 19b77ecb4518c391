"""Who computes goes first: the kernel's scheduling policy of a server's threads.

Owns: the two policies, on systems that have them.
Does not know: what a thread does.

A token wakes half a dozen threads on its way to its reader, each for a tenth of a millisecond. Where all cores compute
each of them would take one away from an engine's thread, and its others would wait for that one. Threads that give way
get the same share of the time, but wait until a core rests or a time slice ends. Where cores are idle nothing changes.
"""

from __future__ import annotations

import os
from contextlib import suppress


def give_way() -> None:
    """From now on this thread, and what it starts, does not take the core of a running thread when it wakes."""
    _change("SCHED_OTHER", "SCHED_BATCH")


def stop_giving_way() -> None:
    """This thread computes: it, and what it starts, is scheduled as usual."""
    _change("SCHED_BATCH", "SCHED_OTHER")


def _change(before: str, after: str) -> None:
    """Of the calling thread, unless somebody has given it another policy."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a sandbox may forbid it
            if os.sched_getscheduler(0) == getattr(os, before):
                os.sched_setscheduler(0, getattr(os, after), os.sched_param(0))
