"""What a weight file holds, as a digest of all its bytes that is computed once.

Owns: the digest, and the note of it in the cache, which holds as long as the file's path, size, inode and times do.
Does not know: which files a model has (`files.py`), what the digest is for.
Next on the path: `description.py`, whose fingerprint is made of it.

The first bytes of a file and its size tell two shapes apart, not two fine-tunes of one. So every byte counts, and since
reading gigabytes takes seconds, each file is read once: `busllm pull` does it, else the first start.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec

from busllm.model_store.files import cache_root

WORTH_NOTING_BYTES = 4 * 2**20  # less is read as fast as a note
# What was written less than a tick of the file system's clock ago may be written again without a change of its times.
_TICK_S, _COARSE_TICK_S = 0.05, 2.0
_PIECE_BYTES = 16 * 2**20
_MAX_THREADS = 8


class FileIdentity(msgspec.Struct, frozen=True):
    """What stands for a file's content while nobody writes to it.

    Attributes:
        path: without symbolic links.
        size_bytes, inode, modified_ns: as the file system has them.
        changed_ns: of the inode; programs that set a file's time, as copying ones do, cannot set this one.
    """

    path: str
    size_bytes: int
    inode: int
    modified_ns: int
    changed_ns: int


class _Note(msgspec.Struct, frozen=True):
    file: FileIdentity
    digest: str


def identify(path: Path) -> FileIdentity:
    """Asks the file system.

    Raises:
        OSError: there is no such file.
    """
    real = path.resolve()
    status = real.stat()
    return FileIdentity(str(real), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def content_digest(path: Path, *, cache_dir: Path | None = None) -> str:
    """The digest of a file's content: the sha256 of the sha256s of its pieces of 16 MiB, in hex.

    Of several processes that ask at the same time one reads and the others wait for its note.

    Args:
        cache_dir: instead of the usual cache folder.

    Raises:
        OSError: the file cannot be read.
    """
    identity = identify(path)
    if identity.size_bytes < WORTH_NOTING_BYTES:
        return _read(path)
    place = note_path(path, cache_dir)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        note = place.open("a+b")
    except OSError:  # a cache that cannot be written may hold the note all the same
        return _noted(place.read_bytes() if place.is_file() else b"", identity) or _read(path)
    with note:
        fcntl.flock(note, fcntl.LOCK_EX)  # the kernel gives it back when its holder dies
        note.seek(0)
        digest = _noted(note.read(), identity)
        if digest is None:
            digest = _read_and_note(path, identity, note)
        return digest


def note_path(path: Path, cache_dir: Path | None = None) -> Path:
    """Where the note of a file is kept: one per path."""
    return cache_root(cache_dir) / "digests" / f"{path_digest(path)}.json"


def path_digest(path: Path) -> str:
    """A name for a path that fits into a file's name."""
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]


def _noted(content: bytes, identity: FileIdentity) -> str | None:
    try:
        note = msgspec.json.decode(content, type=_Note)
    except msgspec.DecodeError:  # empty, or its writer died
        return None
    return note.digest if note.file == identity else None


def _read_and_note(path: Path, identity: FileIdentity, note: BinaryIO) -> str:
    _let_settle(identity)
    digest = _read(path)
    if identify(path) == identity:
        note.truncate(0)
        note.write(msgspec.json.encode(_Note(identity, digest)))
    return digest


def _let_settle(identity: FileIdentity) -> None:
    """Waits, if the file was changed just now, until a further change would show in its times."""
    is_coarse = identity.changed_ns % 10**9 == 0
    tick_s = _COARSE_TICK_S if is_coarse else _TICK_S
    age_s = time.time() - identity.changed_ns / 1e9
    if age_s < tick_s:
        time.sleep(min(tick_s, tick_s - age_s))  # its clock may be ahead of this one


def _read(path: Path) -> str:
    with path.open("rb") as file:

        def digest_from(start: int) -> bytes:
            return hashlib.sha256(os.pread(file.fileno(), _PIECE_BYTES, start)).digest()

        starts = range(0, os.fstat(file.fileno()).st_size, _PIECE_BYTES)
        whole = hashlib.sha256()
        # hashlib computes beside Python, so that several pieces make use of several cores.
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
            for digest in threads.map(digest_from, starts):
                whole.update(digest)
    return whole.hexdigest()
