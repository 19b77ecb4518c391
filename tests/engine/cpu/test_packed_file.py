"""The packed file: what was written is read, and nothing else is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from busllm.engine.cpu.packed_file import VERSION, load, packed_path, remove_stale, save
from busllm.engine.cpu.packed_model import PackedModel
from busllm.engine.cpu.shapes import Format


@pytest.fixture
def packed() -> PackedModel:
    arrays = {
        "head.weights": np.arange(3 * 320, dtype=np.uint8).reshape(3, 1, 320),
        "head.bias": np.arange(5, dtype=np.float32),
        "head_norms": np.zeros((0, 2, 8), np.float32),
    }
    return PackedModel({"head": Format.INT4}, arrays)


def test_what_was_written_is_read(packed: PackedModel, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "model.bin"
    save(packed, path)
    loaded = load(path)
    assert loaded is not None
    assert loaded.formats == packed.formats
    assert loaded.label == "int4"
    for name, array in packed.arrays.items():
        assert loaded.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded.arrays[name], array)
    assert loaded.arrays["head.weights"].ctypes.data % 64 == 0
    assert [entry.name for entry in path.parent.iterdir()] == ["model.bin"]


def test_no_file_is_no_model(tmp_path: Path) -> None:
    assert load(tmp_path / "model.bin") is None


@pytest.mark.parametrize("kept", [0, 4, 40, 400])
def test_a_file_that_was_cut_short_is_no_model(packed: PackedModel, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.bin"
    save(packed, path)
    path.write_bytes(path.read_bytes()[:kept])
    assert load(path) is None


def test_another_version_is_no_model(packed: PackedModel, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    save(packed, path)
    content = path.read_bytes()
    written = f'"version":{VERSION},'.encode()
    assert written in content
    path.write_bytes(content.replace(written, b'"version":0,'))
    assert load(path) is None


def test_what_a_source_held_before_is_removed_and_nothing_else(packed: PackedModel, tmp_path: Path) -> None:
    model, another = tmp_path / "model.gguf", tmp_path / "another.gguf"
    present = packed_path(model, "new", "auto", tmp_path)
    kept = {present, packed_path(model, "new", "int8", tmp_path), packed_path(another, "old", "auto", tmp_path)}
    stale = {packed_path(model, "old", "auto", tmp_path), packed_path(model, "old", "int8", tmp_path)}
    stale.add(present.with_name(present.name.replace(f"-{VERSION}.", f"-{VERSION - 1}.")))
    for path in kept | stale:
        save(packed, path)
    (present.parent / ".draft-new").write_bytes(b"")
    (dead := present.parent / ".draft-dead").write_bytes(b"")
    os.utime(dead, (0, time.time() - 7200))
    in_use = load(packed_path(model, "old", "auto", tmp_path))
    remove_stale(present)
    assert set(present.parent.iterdir()) == kept | {present.parent / ".draft-new"}
    assert in_use is not None
    np.testing.assert_array_equal(in_use.arrays["head.weights"], packed.arrays["head.weights"])
