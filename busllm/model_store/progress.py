"""How far a download is, for sources that do not say so themselves.

Owns: `Progress`, what a watcher of a download is told, and measuring a download by the growth of its folder (pip and
hub clients draw their own bars or none; the bytes on disk are the same for all).
Does not know: what is fetched, how it is shown (`busllm/cli/pull.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

_INTERVAL_S = 0.2


class Progress(Protocol):
    """Is told how a download goes; may be called from another thread."""

    def __call__(self, step: str, done_bytes: int, total_bytes: int | None) -> None:
        """Takes news.

        Args:
            step: what is being done, for people.
            done_bytes: so far in this step.
            total_bytes: of this step, or None when it is not known.
        """
        ...


def ignore_progress(step: str, done_bytes: int, total_bytes: int | None) -> None:
    """A `Progress` for callers that show none."""


@contextmanager
def watch_folder(folder: Path, step: str, total_bytes: int | None, progress: Progress) -> Iterator[None]:
    """Reports the size of a folder while the body runs.

    Args:
        folder: where the download goes; may appear later.
        step: for `progress`.
        total_bytes: the size it will have, if known.
        progress: is called a few times a second, from another thread, and once at the end.
    """
    finished = threading.Event()

    def report() -> None:
        while not finished.wait(_INTERVAL_S):
            done_bytes = _folder_bytes(folder)
            progress(step, done_bytes if total_bytes is None else min(done_bytes, total_bytes), total_bytes)

    reporter = threading.Thread(target=report, name="download-progress", daemon=True)
    progress(step, 0, total_bytes)
    reporter.start()
    try:
        yield
        if total_bytes is not None:
            progress(step, total_bytes, total_bytes)
    finally:
        finished.set()
        reporter.join()


def _folder_bytes(folder: Path) -> int:
    num_bytes = 0
    for path in folder.rglob("*"):
        try:
            num_bytes += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            # A client renames its partial files as it goes.
            continue
    return num_bytes
