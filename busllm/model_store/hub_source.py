"""Models of the Hugging Face hub, fetched with `huggingface_hub`.

Owns: which files of a repository are fetched, and the translation of the library's errors.
Does not know: the cache's layout and locking (`pull.py`).
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from busllm.errors import FetchFailed, MissingPackage, ModelError
from busllm.model_store.progress import Progress, watch_folder

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# Pickled weights are left out on purpose: reading them runs code.
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_SMALL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.*"]


def fetch_repository(hub_id: str, folder: Path, progress: Progress) -> None:
    """Puts the safetensors, configuration and tokenizer of a repository into a folder.

    Files that an earlier, interrupted call left in the folder are not fetched again.

    Raises:
        MissingPackage: `huggingface_hub` is not installed.
        FetchFailed: no such repository, no access, no network.
        ModelError: it has no safetensors.
    """
    try:
        # Imported here: it takes half a second, which only this command should pay.
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise MissingPackage(
            f"{hub_id!r} is on the Hugging Face hub; install huggingface_hub to fetch it, or name a folder."
        ) from error
    wanted = [*_WEIGHTS, *_SMALL_FILES]
    try:
        progress(f"Looking up {hub_id}", 0, None)
        total_bytes = _total_bytes(HfApi(), hub_id, wanted)
        with watch_folder(folder, f"Fetching {hub_id}", total_bytes, progress):
            snapshot_download(hub_id, local_dir=folder, allow_patterns=wanted)
    except ModelError:
        raise
    except Exception as error:
        # The library lets errors of several HTTP and file packages through; all of them mean "not fetched".
        raise FetchFailed(f"{hub_id!r} could not be fetched from the Hugging Face hub: {error}") from error


def _total_bytes(api: HfApi, hub_id: str, wanted: list[str]) -> int:
    siblings = api.model_info(hub_id, files_metadata=True).siblings or []
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in siblings}
    names = [name for name in sizes if any(fnmatch(name, pattern) for pattern in wanted)]
    if not any(name.endswith(".safetensors") for name in names):
        raise ModelError(f"{hub_id!r} has no safetensors weights, which are the only ones that are fetched.")
    return sum(sizes[name] for name in names)
