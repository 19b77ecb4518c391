"""What other servers are given: their packages and their forms of the model."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from safetensors import safe_open

from bench.compare.models import PeerModel
from bench.compare.peers.choice import OTHERS, other
from bench.compare.peers.environment import VirtualEnvironment
from bench.compare.peers.vllm import needed
from busllm.errors import ModelError
from busllm.model_store.weights import iter_tensors
from busllm.testing.tiny_gguf import write_tiny_gguf
from busllm.testing.tiny_model import write_tiny_model

WHOLE_BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerModel:
    """A tiny Llama in Q4_1."""
    monkeypatch.setenv("BUSLLM_CACHE", str(tmp_path / "cache"))
    checkpoint = tmp_path / "checkpoint"
    write_tiny_model(checkpoint, "llama", **WHOLE_BLOCKS)
    file = write_tiny_gguf(checkpoint, tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1)
    return PeerModel.of(str(file), tmp_path / "forms")


def test_the_hugging_face_folder_has_our_own_weights_in_bfloat16(model: PeerModel) -> None:
    folder = model.hugging_face_folder()
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    ours = {name: tensor.to_float32() for name, tensor in iter_tensors(model.files)}
    with safe_open(folder / "model.safetensors", framework="pt") as theirs:
        for name in theirs.keys():  # noqa: SIM118 - it is no mapping
            written = theirs.get_tensor(name)
            assert str(written.dtype) == "torch.bfloat16"
            np.testing.assert_allclose(written.float().numpy(), ours[name], rtol=2**-8)
        assert set(ours) - set(theirs.keys()) <= {"lm_head.weight"}


def test_the_q4_0_file_has_the_same_tensors_and_metadata_and_nearly_the_same_values(model: PeerModel) -> None:
    assert model.files.gguf is not None
    before, after = gguf.GGUFReader(model.files.gguf), gguf.GGUFReader(model.q4_0_file())
    changed = {"GGUF.kv_count", "general.file_type"}
    assert set(before.fields) - changed == set(after.fields) - changed
    for name in set(before.fields) - changed:
        assert before.fields[name].contents() == after.fields[name].contents(), name
    kinds = set()
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert old.name == new.name
        kinds.add(new.tensor_type.name)
        was, now = gguf.dequantize(old.data, old.tensor_type), gguf.dequantize(new.data, new.tensor_type)
        assert np.abs(was - now).max() <= 0.15 * np.abs(was).max()
    assert kinds == {"Q4_0", "F32"}


def test_a_form_of_a_model_is_made_once(model: PeerModel) -> None:
    file = model.q4_0_file()
    made_at = file.stat().st_mtime_ns
    assert (model.q4_0_file(), file.stat().st_mtime_ns) == (file, made_at)


def test_llama_is_refused_a_model_that_is_no_gguf(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny", "llama")
    model = PeerModel.of(str(tmp_path / "tiny"), tmp_path / "forms")
    with pytest.raises(ModelError, match="no GGUF"):
        model.q4_0_file()


def test_a_server_that_is_not_installed_says_so(model: PeerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERS", str(model.folder / "nothing"))
    for name in OTHERS:
        peer = other(name, model, kv_tokens=65536)
        assert (peer.name, peer.is_installed) == (name, False)


def test_every_server_gets_a_cache_of_as_many_tokens(model: PeerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is told bytes: keys and values of all layers, 2 KV heads of 16 dimensions, 2 bytes each."""
    monkeypatch.setenv("PEERS", str(model.folder / "nothing"))
    vllm = other("vllm", model, kv_tokens=1024).launch(port=1).command
    llama = other("llama", model, kv_tokens=1024).launch(port=1).command
    assert model.files.config is not None
    num_layers = json.loads(model.files.config.read_text())["num_hidden_layers"]
    assert vllm[vllm.index("--kv-cache-memory-bytes") + 1] == str(1024 * 2 * num_layers * 2 * 16 * 2)
    assert "1024" in llama


def test_packages_are_found_in_the_environment_that_has_them(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    (site / "thing-2.5.dist-info").mkdir(parents=True)
    (site / "thing-2.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 2.5\n")
    (tmp_path / "bin").mkdir()
    environment = VirtualEnvironment(tmp_path)
    assert environment.distribution("thing") is None  # an environment without an interpreter is none
    environment.python.touch()
    found = environment.distribution("thing")
    assert found is not None
    assert found.version == "2.5"
    assert environment.distribution("other") is None


def test_only_requirements_that_text_needs_here_are_installed() -> None:
    listed = ["numpy", "torchvision==1", "torch==2", "cats; extra == 'pets'", "winter; sys_platform == 'win32'"]
    assert list(needed([*listed, "here>=1; sys_platform != 'win32'"])) == ["numpy", "here>=1"]
