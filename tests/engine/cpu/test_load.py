"""The packed weights of one model are not those of another, whatever they have in common."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from busllm.engine.cpu.kernels import are_compiled, prepare_kernels, remove_unused
from busllm.engine.cpu.packed_model import PackedModel
from busllm.engine.models.config import read_config
from busllm.engine.tensor_reader import TensorAccount
from busllm.errors import ModelError
from busllm.model_store.description import describe
from busllm.model_store.files import read_json
from busllm.model_store.resolve import resolve
from busllm.model_store.weights import iter_tensors
from busllm.testing.tiny_model import write_tiny_model

LAYER = "layers.2.self_attn.v_proj.weight"  # the last of the file


def packed(folder: Path, while_reading: Callable[[], object] = lambda: None) -> PackedModel:
    """As a start gets them."""
    prepare_kernels()
    from busllm.engine.cpu.load import Checkpoint, packed_weights

    files = resolve(str(folder))
    assert files.config is not None

    def open_tensors() -> TensorAccount:
        while_reading()
        return TensorAccount(dict(iter_tensors(files)))

    checkpoint = Checkpoint(open_tensors, files.weights[0], lambda: describe(files).fingerprint)
    return packed_weights(read_config(read_json(files.config)), checkpoint, "int8")


def change(folder: Path) -> None:
    """Other weights in a file of the same size, header and beginning."""
    path = folder / "model.safetensors"
    tensors, head = load_file(path), path.read_bytes()[: 64 * 1024]
    name = next(name for name in tensors if name.endswith(LAYER))
    tensors[name] = tensors[name].roll(1, 0).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    assert path.read_bytes()[: 64 * 1024] == head


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose packed form is kept, however small, in a cache of its own."""
    monkeypatch.setenv("BUSLLM_CACHE", str(tmp_path / "cache"))
    prepare_kernels(tmp_path / "kernels")
    monkeypatch.setattr("busllm.engine.cpu.load.WORTH_KEEPING_BYTES", 0)
    return write_tiny_model(tmp_path / "model")


def assert_different(one: PackedModel, other: PackedModel) -> None:
    assert any(not np.array_equal(one.arrays[name], other.arrays[name]) for name in one.arrays)


def test_a_fine_tune_of_the_same_shape_gets_its_own_packed_weights(tiny: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny, tmp_path / "fine-tune")
    change(other)
    assert_different(packed(tiny), packed(other))
    assert len(list((tmp_path / "cache" / "packed").iterdir())) == 2


def test_a_file_that_is_replaced_in_place_is_packed_again_and_the_old_form_removed(tiny: Path, tmp_path: Path) -> None:
    before, status = packed(tiny), (tiny / "model.safetensors").stat()
    change(tiny)
    os.utime(tiny / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert_different(before, packed(tiny))
    assert len(list((tmp_path / "cache" / "packed").iterdir())) == 1


def test_weights_that_change_while_they_are_read_are_not_served(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="changed while it was read"):
        packed(tiny, while_reading=lambda: change(tiny))
    assert not (tmp_path / "cache" / "packed").exists()


def test_kernels_of_other_versions_are_removed_when_they_are_many_and_old(tmp_path: Path) -> None:
    folders = [tmp_path / f"x86-64-{index}" for index in range(7)]
    others = [tmp_path / "x86-64-v3-0", tmp_path / "znver5-0"]
    for age_days, folder in enumerate(folders + others):
        (folder / "inside").mkdir(parents=True)
        os.utime(folder, (0, folder.stat().st_mtime - age_days * 86400 - 3600))
    os.utime(folders[5])
    remove_unused(folders[0])
    assert sorted(tmp_path.iterdir()) == sorted([*folders[:3], folders[5], *others])
    for folder in (*folders[:3], folders[5]):
        os.utime(folder)
    for recent in (tmp_path / "x86-64-8", tmp_path / "x86-64-9"):
        recent.mkdir()
    remove_unused(folders[0])
    assert len(list(tmp_path.glob("x86-64-?"))) == 6


def test_a_folder_without_indexes_holds_no_kernels_yet(tmp_path: Path) -> None:
    assert not are_compiled(tmp_path)
    (tmp_path / "cpu_0").mkdir()
    (tmp_path / "cpu_0" / "step.logits-1.py311.nbi").touch()
    assert are_compiled(tmp_path)
