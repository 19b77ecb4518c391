"""Printing for people and for pipes.

Owns: consoles that print tables, whole lines and no colours when the output is no terminal.
Does not know: what is printed.
"""

from __future__ import annotations

import sys
from typing import IO

from rich.console import Console, RenderableType

_PIPE_WIDTH = 10_000  # a pipe has no width: nothing is cut or wrapped for it


def console(file: IO[str] | None = None) -> Console:
    """A console on stdout or another file; text is printed as it is, without markup."""
    file = file or sys.stdout
    width = None if file.isatty() else _PIPE_WIDTH
    return Console(file=file, highlight=False, markup=False, emoji=False, width=width)


def print_aligned(out: Console, renderable: RenderableType) -> None:
    """Prints a table; in a pipe without the blanks that fill its last column."""
    if out.is_terminal:
        out.print(renderable)
        return
    with out.capture() as capture:
        out.print(renderable)
    out.file.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))
    out.file.flush()
