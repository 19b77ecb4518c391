"""From a model's name to its files.

Owns: what a source may be (alias, hub id, folder, GGUF file, "null") and what to tell somebody whose model is not
there.
Does not know: how to fetch one (`pull.py`); nothing here uses the network.
Next on the path: `description.py` for stages without an engine, `weights.py` for the engine.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec

from busllm.errors import ModelError
from busllm.model_store.aliases import ALIASES, nearest
from busllm.model_store.content_digest import identify
from busllm.model_store.files import (
    CONFIG,
    NULL_SOURCE,
    TOKENIZER,
    ModelFiles,
    cache_root,
    models_folder,
    scan_folder,
    small_files,
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(source: str, *, cache_dir: Path | None = None) -> ModelFiles:
    """Finds the files of a model that is on this machine.

    Args:
        source: an alias ("smollm2-135m"), a folder, a GGUF file, a hub id ("org/name"), or "null". What fits several
            of them is the first.
        cache_dir: instead of the usual cache folder.

    Raises:
        ModelError: it is not here (the message says which command fetches it) or its files are incomplete.
    """
    if source == NULL_SOURCE:
        return ModelFiles(name=NULL_SOURCE)
    path = Path(source).expanduser()
    if source in ALIASES:
        return _resolve_fetched(source, cache_dir)
    if path.suffix == ".gguf":
        return _resolve_gguf(path, cache_dir)
    if path.is_dir():
        return _resolve_folder(path.resolve(), path.resolve().name, cache_dir)
    if is_hub_id(source):
        return _resolve_fetched(source, cache_dir)
    raise unknown_source(source, cache_dir)


def is_hub_id(source: str) -> bool:
    """Whether the text has the form of a hub id, "org/name"."""
    return _HUB_ID.fullmatch(source) is not None


def folder_name(source: str) -> str:
    """The name of a fetched model's folder in the cache; unique, as neither part of a hub id may have "--"."""
    return source.replace("/", "--")


def unknown_source(source: str, cache_dir: Path | None) -> ModelError:
    """The error for a text that names no model; it has the nearest name that would."""
    fetched = [folder.name.replace("--", "/") for folder in models_folder(cache_dir).glob("[!.]*")]
    names = dict.fromkeys([*ALIASES, *fetched, NULL_SOURCE])
    suggestion = nearest(source, names)
    hint = f" Did you mean {suggestion!r}?" if suggestion else ""
    return ModelError(
        f"{source!r} is not a model: neither an alias ({', '.join(ALIASES)}), nor a hub id (org/name), nor a folder, "
        f"nor a .gguf file, nor {NULL_SOURCE!r}.{hint}"
    )


def _resolve_fetched(source: str, cache_dir: Path | None) -> ModelFiles:
    folder = models_folder(cache_dir) / folder_name(source)
    if not folder.is_dir():
        raise ModelError(f"The model {source!r} is not on this machine. Fetch it: busllm pull {source}")
    return _resolve_folder(folder, source, cache_dir)


def _resolve_folder(folder: Path, name: str, cache_dir: Path | None) -> ModelFiles:
    files = scan_folder(folder, name)
    if files.config is not None and files.tokenizer is not None:
        return files
    if files.gguf is None:
        absent = CONFIG if files.config is None else TOKENIZER
        raise ModelError(f"{folder} has no {absent}.")
    return _with_derived(files.gguf, name, cache_dir)


def _resolve_gguf(path: Path, cache_dir: Path | None) -> ModelFiles:
    if not path.is_file():
        raise ModelError(f"There is no file {path}.")
    return _with_derived(path.resolve(), path.stem, cache_dir)


def _with_derived(gguf: Path, name: str, cache_dir: Path | None) -> ModelFiles:
    """Files of a GGUF outside the cache: its small files are derived once, into the cache."""
    identity = msgspec.json.encode(identify(gguf))
    folder = cache_root(cache_dir) / "derived" / hashlib.sha256(identity).hexdigest()[:24]
    if not (folder / CONFIG).is_file():
        # Only this rare path needs numpy and ggml's tables.
        from busllm.model_store.derive import derive_small_files

        folder.mkdir(parents=True, exist_ok=True)
        derive_small_files(gguf, folder)
    return msgspec.structs.replace(small_files(folder, name), gguf=gguf)
