"""`busllm pull MODEL`: fetches a model into the cache.

Owns: the progress bar.
Does not know: where models come from (`busllm/model_store/pull.py`).
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from busllm.errors import BusllmError
from busllm.model_store.files import ModelFiles
from busllm.model_store.pull import pull


def run(source: str) -> int:
    """Fetches a model, with a progress bar on stderr; prints where it is.

    Returns:
        The exit status: 0, or 1 when it could not be fetched.
    """
    console = Console(stderr=True)
    try:
        files = _pull(source, console)
    except BusllmError as error:
        console.print(f"busllm pull: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    place = files.gguf or files.directory or "nothing to fetch"
    console.print(f"{files.name}: {place}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _pull(source: str, console: Console) -> ModelFiles:
    columns: tuple[ProgressColumn, ...] = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    columns += (TransferSpeedColumn(), TimeRemainingColumn())
    # In a log file a bar would leave nothing but blank lines.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        steps: dict[str, TaskID] = {}

        def show(step: str, done_bytes: int, total_bytes: int | None) -> None:
            if step not in steps:
                steps[step] = bar.add_task(step, total=total_bytes)
            bar.update(steps[step], completed=done_bytes)

        return pull(source, progress=show)
