"""A digest of all bytes, and the note by which a file is read once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from busllm.model_store.content_digest import WORTH_NOTING_BYTES, content_digest, note_path

SIZES = [10, WORTH_NOTING_BYTES, 16 * 2**20 + 1]


def write(path: Path, size_bytes: int, last: bytes) -> Path:
    with path.open("wb") as file:
        file.truncate(size_bytes - 1)
        file.seek(size_bytes - 1)
        file.write(last)
    return path


def change_the_note(path: Path, cache_dir: Path) -> None:
    """So that it shows where a digest came from."""
    place = note_path(path, cache_dir)
    note = json.loads(place.read_text())
    place.write_text(json.dumps({**note, "digest": "noted"}))


@pytest.mark.parametrize("size_bytes", SIZES)
def test_files_that_differ_in_the_last_byte_alone_have_different_digests(tmp_path: Path, size_bytes: int) -> None:
    one, same, other = (
        write(tmp_path / name, size_bytes, last) for name, last in (("a", b"1"), ("b", b"1"), ("c", b"2"))
    )
    digest = content_digest(one, cache_dir=tmp_path)
    assert content_digest(same, cache_dir=tmp_path) == digest
    assert content_digest(other, cache_dir=tmp_path) != digest


def test_a_large_file_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "weights", WORTH_NOTING_BYTES, b"1")
    content_digest(path, cache_dir=tmp_path)
    change_the_note(path, tmp_path)
    assert content_digest(path, cache_dir=tmp_path) == "noted"


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_file_that_was_changed_in_place_is_read_again_whatever_its_time_says(tmp_path: Path, size_bytes: int) -> None:
    path = write(tmp_path / "weights", size_bytes, b"1")
    before, digest = path.stat(), content_digest(path, cache_dir=tmp_path)
    write(path, size_bytes, b"2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert content_digest(path, cache_dir=tmp_path) != digest


def test_a_file_that_was_replaced_by_another_of_its_size_and_time_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "weights", WORTH_NOTING_BYTES, b"1")
    before, digest = path.stat(), content_digest(path, cache_dir=tmp_path)
    other = write(tmp_path / "other", WORTH_NOTING_BYTES, b"2")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert content_digest(path, cache_dir=tmp_path) != digest


@pytest.mark.parametrize("content", [b"", b"{", b"{}"])
def test_a_damaged_note_is_made_again(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "weights", WORTH_NOTING_BYTES, b"1")
    digest = content_digest(path, cache_dir=tmp_path)
    note_path(path, tmp_path).write_bytes(content)
    assert content_digest(path, cache_dir=tmp_path) == digest
    assert json.loads(note_path(path, tmp_path).read_text())["digest"] == digest


def test_without_a_cache_that_can_be_written_the_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "weights", WORTH_NOTING_BYTES, b"1")
    (tmp_path / "not a folder").write_text("")
    assert content_digest(path, cache_dir=tmp_path / "not a folder") == content_digest(path, cache_dir=tmp_path)
