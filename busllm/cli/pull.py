"""`busllm pull MODEL`: fetches a model into the cache.

Owns: the progress bar.
Does not know: where models come from (`busllm/model_store/pull.py`).
"""

from __future__ import annotations

import argparse

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

from busllm.cli.start_checks import check_model
from busllm.engine.openmp import calm_openmp
from busllm.model_store.files import ModelFiles
from busllm.model_store.pull import pull
from busllm.topology.config import ModelConfig, Topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("model", metavar="MODEL", help="alias, hub id, directory or file.gguf")


def execute(arguments: argparse.Namespace) -> int:
    """Fetches a model into the cache, with a progress bar on stderr, prepares it, and prints where it is.

    A model that is here and cannot be served ends it with status 2 and the reason.
    """
    files = fetch(arguments.model)
    check_model(Topology(model=ModelConfig(source=arguments.model)), files, computes_here=False)
    prepare(files)
    place = files.gguf or files.directory or "nothing to fetch"
    Console(stderr=True).print(f"{files.name}: {place}", markup=False, highlight=False, soft_wrap=True)
    return 0


def prepare(files: ModelFiles) -> None:
    """Makes what the first start would make: on a CPU, packed weights and compiled kernels."""
    if files.is_null:
        return
    console = Console(stderr=True)
    console.print("preparing weights and kernels ...", markup=False, highlight=False, soft_wrap=True)
    calm_openmp()
    from busllm.engine.loader import prepare_model  # imports torch

    prepare_model(files)


def fetch(source: str) -> ModelFiles:
    """Fetches a model unless it is here, with a progress bar on stderr.

    Raises:
        ModelError: it cannot be fetched.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"fetching {source} ...", markup=False, highlight=False, soft_wrap=True)
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
