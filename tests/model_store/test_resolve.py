"""From a model's name to its files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from busllm.errors import ModelError
from busllm.model_store.files import ModelFiles, cache_root
from busllm.model_store.resolve import resolve


def _write_folder(folder: Path) -> Path:
    import numpy as np

    folder.mkdir(parents=True)
    save_file({"a": np.zeros(2, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_an_alias_that_was_not_fetched_says_how_to_fetch_it(tmp_path: Path):
    with pytest.raises(ModelError, match="Fetch it: busllm pull smollm2-135m"):
        resolve("smollm2-135m", cache_dir=tmp_path)


def test_a_hub_id_that_was_not_fetched_says_how_to_fetch_it(tmp_path: Path):
    with pytest.raises(ModelError, match="Fetch it: busllm pull some-org/some-model"):
        resolve("some-org/some-model", cache_dir=tmp_path)


def test_a_misspelt_alias_gets_the_nearest_one(tmp_path: Path):
    with pytest.raises(ModelError, match="Did you mean 'smollm2-135m'"):
        resolve("smolm2-135", cache_dir=tmp_path)


def test_a_misspelt_fetched_model_gets_the_nearest_one(tmp_path: Path):
    _write_folder(tmp_path / "models" / "some-org--tiny-model")
    with pytest.raises(ModelError, match="Did you mean 'some-org/tiny-model'"):
        resolve("tiny-model", cache_dir=tmp_path)


def test_the_null_model_has_no_files():
    files = resolve("null")
    assert files == ModelFiles(name="null")
    assert files.is_null


def test_a_folder_is_served_under_its_own_name(tmp_path: Path):
    folder = _write_folder(tmp_path / "my-model")
    files = resolve(str(folder))
    assert (files.name, files.directory, files.gguf) == ("my-model", folder, None)
    assert files.safetensors == (folder / "model.safetensors",)
    assert files.config == folder / "config.json"
    assert files.chat_template is None


def test_a_fetched_hub_model_is_served_under_its_hub_id(tmp_path: Path):
    _write_folder(tmp_path / "models" / "some-org--tiny-model")
    assert resolve("some-org/tiny-model", cache_dir=tmp_path).name == "some-org/tiny-model"


def test_a_folder_without_weights_or_without_a_tokenizer_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no weights"):
        resolve(str(tmp_path / "empty"))
    folder = _write_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        resolve(str(folder))


def test_a_folder_with_two_gguf_files_asks_which_one(write_gguf, tmp_path: Path):
    write_gguf("a.gguf")
    write_gguf("b.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files \(a.gguf, b.gguf\)"):
        resolve(str(tmp_path))


def test_a_gguf_file_gets_its_small_files_in_the_cache_once(write_gguf, tmp_path: Path):
    path = write_gguf("my-model.gguf")
    files = resolve(str(path), cache_dir=tmp_path / "cache")
    assert (files.name, files.gguf) == ("my-model", path)
    assert files.config is not None and files.tokenizer is not None and files.chat_template is not None
    assert json.loads(files.config.read_text())["hidden_size"] == 64
    files.config.write_text('{"kept": true}')
    again = resolve(str(path), cache_dir=tmp_path / "cache")
    assert again == files
    assert json.loads(files.config.read_text()) == {"kept": True}


def test_a_gguf_file_that_was_replaced_is_read_again(write_gguf, tmp_path: Path):
    path = write_gguf("my-model.gguf")
    before = resolve(str(path), cache_dir=tmp_path / "cache")
    os.utime(path, ns=(1, 1))
    assert resolve(str(path), cache_dir=tmp_path / "cache").directory != before.directory


def test_a_folder_with_only_a_gguf_file_is_enough(write_gguf, tmp_path: Path):
    path = write_gguf()
    files = resolve(str(tmp_path), cache_dir=tmp_path / "cache")
    assert files.gguf == path
    assert files.config is not None and files.config.is_file()


def test_an_absent_gguf_file_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="There is no file"):
        resolve(str(tmp_path / "absent.gguf"))


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("BUSLLM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "busllm"
    monkeypatch.setenv("BUSLLM_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    assert cache_root(tmp_path) == tmp_path
