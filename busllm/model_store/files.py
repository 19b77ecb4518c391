"""A model's files: which they are and where the cache keeps them.

Owns: `ModelFiles`, the location of the cache, and reading a folder's file names.
Does not know: how a source is named (`resolve.py`), where files come from (`pull.py`), what is in them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from busllm.errors import ModelError

NULL_SOURCE = "null"

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
SAFETENSORS_INDEX = "model.safetensors.index.json"


class ModelFiles(msgspec.Struct, frozen=True):
    """Where the files of one model are. A file that the model does not have is None.

    Attributes:
        name: the name under which the model is served.
        directory: where the small files are (not always where a GGUF is); None for the null model.
        gguf: weights in GGUF.
        safetensors: weights in safetensors, one file or the shards of one checkpoint, sorted by name.
        config: the architecture, `config.json` as Hugging Face writes it.
        generation_config: end-of-turn tokens and default sampling.
        tokenizer: `tokenizer.json`.
        tokenizer_config: names of special tokens; older models keep their chat template here.
        chat_template: the template in a file of its own.
    """

    name: str
    directory: Path | None = None
    gguf: Path | None = None
    safetensors: tuple[Path, ...] = ()
    config: Path | None = None
    generation_config: Path | None = None
    tokenizer: Path | None = None
    tokenizer_config: Path | None = None
    chat_template: Path | None = None

    @property
    def is_null(self) -> bool:
        """Whether this is the null model, which has no files."""
        return self.directory is None

    @property
    def weights(self) -> tuple[Path, ...]:
        """The files with the weights."""
        return self.safetensors if self.gguf is None else (self.gguf,)


def cache_root(cache_dir: Path | None = None) -> Path:
    """The cache folder: `cache_dir`, else `$BUSLLM_CACHE`, else `$XDG_CACHE_HOME/busllm` (`~/.cache/busllm`)."""
    if cache_dir is not None:
        return cache_dir
    if own := os.environ.get("BUSLLM_CACHE"):
        return Path(own)
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "busllm"


def models_folder(cache_dir: Path | None = None) -> Path:
    """The folder that has one folder per fetched model."""
    return cache_root(cache_dir) / "models"


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ModelError: unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def small_files(folder: Path, name: str) -> ModelFiles:
    """The files of a folder that are not weights, by their usual names."""

    def existing(file_name: str) -> Path | None:
        path = folder / file_name
        return path if path.is_file() else None

    return ModelFiles(
        name=name,
        directory=folder,
        config=existing(CONFIG),
        generation_config=existing(GENERATION_CONFIG),
        tokenizer=existing(TOKENIZER),
        tokenizer_config=existing(TOKENIZER_CONFIG),
        chat_template=existing(CHAT_TEMPLATE),
    )


def scan_folder(folder: Path, name: str) -> ModelFiles:
    """Finds a model's files in a folder, weights included, by their usual names.

    Args:
        name: the name under which the model is served.

    Raises:
        ModelError: no weights, several GGUF files, or a shard that the index lists is absent.
    """
    safetensors = _find_safetensors(folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if not safetensors and len(ggufs) > 1:
        listed = ", ".join(path.name for path in ggufs)
        raise ModelError(f"{folder} has several GGUF files ({listed}); name one of them as the model.")
    if not safetensors and not ggufs:
        raise ModelError(f"{folder} has no weights: neither *.safetensors nor a *.gguf file.")
    gguf = None if safetensors else ggufs[0]
    return msgspec.structs.replace(small_files(folder, name), gguf=gguf, safetensors=safetensors)


def _find_safetensors(folder: Path) -> tuple[Path, ...]:
    index = folder / SAFETENSORS_INDEX
    if not index.is_file():
        return tuple(sorted(folder.glob("*.safetensors")))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map.")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).is_absolute() or ".." in Path(file_name).parts:
            raise ModelError(f"{index} says that {name!r} is in {file_name!r}, which is no file of this folder.")
    # Only the index says which shards belong together: a folder may also hold, say, an adapter.
    shards = tuple(folder / file_name for file_name in sorted(set(weight_map.values())))
    for shard in shards:
        if not shard.is_file():
            raise ModelError(f"{shard} is absent, but {index.name} lists it; fetch the model again.")
    return shards
