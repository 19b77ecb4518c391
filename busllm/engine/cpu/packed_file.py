"""A packed model on disk: one file that is mapped into memory, so that a start reads no more than it computes with.

Owns: the file's layout and name, and the removal of those that nothing will ask for again. It is replaced by rename, so
that a reader never sees half of one; who has mapped a file that is removed keeps it.
Does not know: what the arrays mean.

Layout: 8 bytes length, a JSON header (version, formats, per array its dtype, shape and offset), then the arrays, each
at a cache line.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busllm.engine.cpu.pack import ALIGNMENT_BYTES
from busllm.engine.cpu.packed_model import PackedModel
from busllm.engine.cpu.shapes import Format, padded
from busllm.model_store.content_digest import path_digest
from busllm.model_store.files import cache_root

VERSION = 6  # of the layouts in this file and in `pack.py`, and of the choice of outliers
_DRAFT = ".draft-"
_DEAD_DRAFT_S = 3600.0  # nobody writes for that long


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int


class _Header(msgspec.Struct, frozen=True):
    version: int
    formats: dict[str, int]
    arrays: dict[str, _Entry]


def packed_path(source: Path, fingerprint: str, quantization: str, cache_dir: Path | None = None) -> Path:
    """Where the packed form of a model is kept.

    Args:
        source: the model's weights, or the first file of them.
        fingerprint: of everything in the model's files.
        quantization: as asked for.
        cache_dir: instead of the usual cache folder.
    """
    folder = cache_root(cache_dir) / "packed"
    return folder / f"{path_digest(source)}-{fingerprint}-{quantization}-{VERSION}.bin"


def remove_stale(path: Path) -> None:
    """Removes packed forms of what the same source held before, or in layouts of other versions, and dead drafts.

    Args:
        path: of the present form; those in other quantizations stay too.
    """
    source, fingerprint, *_ = path.stem.split("-")
    for other in path.parent.glob(f"{source}-*.bin"):
        if other.stem.split("-")[1] != fingerprint or other.stem.rpartition("-")[2] != str(VERSION):
            other.unlink(missing_ok=True)
    for draft in path.parent.glob(f"{_DRAFT}*"):
        with suppress(FileNotFoundError):  # another process was first
            if time.time() - draft.stat().st_mtime > _DEAD_DRAFT_S:
                draft.unlink()


def save(packed: PackedModel, path: Path) -> None:
    """Writes the file.

    Raises:
        OSError: it cannot be written.
    """
    entries, offset = {}, 0
    for name, array in packed.arrays.items():
        entries[name] = _Entry(array.dtype.str, array.shape, offset)
        offset += padded(array.nbytes, ALIGNMENT_BYTES)
    header = msgspec.json.encode(_Header(VERSION, {k: int(v) for k, v in packed.formats.items()}, entries))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_DRAFT, delete=False) as draft:
        try:
            draft.write(len(header).to_bytes(8, "little") + header)
            for array in packed.arrays.values():
                draft.write(bytes(-draft.tell() % ALIGNMENT_BYTES))
                draft.write(np.ascontiguousarray(array).data)
            draft.flush()
            Path(draft.name).replace(path)
        except BaseException:
            Path(draft.name).unlink()
            raise


def load(path: Path) -> PackedModel | None:
    """Maps the file; None when there is none, or one of another version or cut short."""
    try:
        # Not mode "r": numba compiles everything once more for arrays that cannot be written.
        mapped = np.memmap(path, dtype=np.uint8, mode="c")
    except (OSError, ValueError):  # absent, or empty
        return None
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    try:
        header = msgspec.json.decode(mapped[8 : 8 + length].tobytes(), type=_Header)
    except msgspec.DecodeError:
        return None
    if header.version != VERSION:
        return None
    start = padded(8 + length, ALIGNMENT_BYTES)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, entry in header.arrays.items():
        dtype = np.dtype(entry.dtype)
        first = start + entry.offset
        end = first + dtype.itemsize * int(np.prod(entry.shape))
        if end > len(mapped):
            return None
        arrays[name] = mapped[first:end].view(dtype).reshape(entry.shape)
    return PackedModel({name: Format(kind) for name, kind in header.formats.items()}, arrays)
