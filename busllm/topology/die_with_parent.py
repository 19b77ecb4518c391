"""Runs a command that the kernel kills when its parent dies, even by SIGKILL.

Owns: asking the kernel for that (Linux) and becoming the command. `wrapper_command` builds the command line.
Does not know: what the command is. Nothing of busllm and only the standard library is imported, so that the script
starts in about 15 ms:

    python -I -S die_with_parent.py PARENT_PID -- COMMAND [ARGUMENT…]

The pid stays the same, since the script becomes the command by exec. Elsewhere than on Linux it only does that; there a
child must notice by itself that its parent is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_USAGE = "usage: die_with_parent.py PARENT_PID -- COMMAND [ARGUMENT...]"


def wrapper_command(parent_pid: int) -> list[str]:
    """What to put in front of a command that is to be killed when the process `parent_pid`, its parent, dies.

    The kernel watches the *thread* that starts the child; start it from one that lives as long as the process.
    """
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(parent_pid), "--"]


def main(arguments: Sequence[str]) -> None:
    """Becomes the command; returns only by exception."""
    if len(arguments) < 3 or arguments[1] != "--" or not arguments[0].isdigit():
        sys.exit(_USAGE)
    parent_pid, command = int(arguments[0]), list(arguments[2:])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"die_with_parent.py: prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"die_with_parent.py: {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
