"""Why a process of `busllm up` ended, from the child to its parent: one line through a pipe.

Owns: the pipe, the environment variable that names its end, and the form of the line.
Does not know: what ends a process. Log lines say it as well; but only the parent can say it last, where people look.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

LAST_WORDS_VARIABLE = "BUSLLM_LAST_WORDS_FD"
_MOST_BYTES = 4096  # a pipe holds more than that, so that nobody waits


class LastWords:
    """The parent's side: made before the child starts, read when it has ended."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)

    def started(self) -> None:
        """The child has its end; this process needs it no more."""
        os.close(self.writer)

    def read(self) -> str:
        """What the child said; empty when it said nothing. Only once."""
        try:
            return os.read(self._reader, _MOST_BYTES).decode(errors="replace").strip()
        except BlockingIOError:
            return ""  # a process that the child left behind holds the pipe open
        finally:
            os.close(self._reader)


def say_last_words(reason: str, environment: Mapping[str, str] = os.environ) -> None:
    """The child's side: tells the parent why this process is about to end; nobody listens without one."""
    fd = environment.get(LAST_WORDS_VARIABLE, "")
    if fd.isdigit():
        with suppress(OSError):  # the parent is gone, and so is who would read it
            os.write(int(fd), " ".join(reason.split()).encode()[:_MOST_BYTES])
