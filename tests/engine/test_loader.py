"""Loading: what does not fit is refused with its names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from busllm.engine.cpu.instructions import detect_instructions
from busllm.engine.loader import LoadConfig, load_runner
from busllm.engine.models.config import read_config
from busllm.errors import MissingPackage, ModelError
from busllm.testing.tiny_model import write_tiny_model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "llama")


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(directory: Path, **values: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_all_that_does_not_fit_is_named_at_once(tiny: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.norm.weight"] = torch.ones(7)
        tensors["model.layers.0.adapter.weight"] = torch.ones(3)

    change_weights(tiny, spoil)
    with pytest.raises(ModelError) as error:
        load_runner(str(tiny))
    assert "missing: model.layers.1.self_attn.k_proj.weight" in error.value.message
    assert "model.norm.weight is 7 and should be 48" in error.value.message
    assert "unknown: model.layers.0.adapter.weight" in error.value.message


def test_weights_of_another_size_than_the_configuration_are_refused(tiny: Path) -> None:
    change_config(tiny, num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"unknown: model\.layers\.2\."):
        load_runner(str(tiny))


def test_an_architecture_without_a_decoder_of_its_own_is_named_with_those_that_have_one(tiny: Path) -> None:
    raw = json.loads((tiny / "config.json").read_text()) | {"architectures": ["OPTForCausalLM"]}
    with pytest.raises(ModelError, match=r"OPTForCausalLM has no decoder of its own\. .* LlamaForCausalLM, Mistral"):
        read_config(raw)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "gelu", "gelu"),
        ("quantization_config", {"quant_method": "gptq"}, "gptq"),
        ("num_key_value_heads", 4, "evenly"),
        ("vocab_size", None, "vocab_size"),
        ("rope_parameters", {"rope_type": "longrope"}, "no short_factor"),
    ],
)
def test_a_configuration_that_is_not_covered_is_refused(tiny: Path, key: str, value: object, message: str) -> None:
    raw = json.loads((tiny / "config.json").read_text()) | {key: value}
    with pytest.raises(ModelError, match=message):
        read_config(raw)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoadConfig(device="tpu"), "not a device"),
        (LoadConfig(device="meta"), "not supported"),
        (LoadConfig(dtype="float64"), "float64"),
    ],
)
def test_a_device_or_dtype_that_is_not_there_is_refused(tiny: Path, config: LoadConfig, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_runner(str(tiny), config)


def test_an_attention_backend_that_is_not_installed_is_refused(tiny: Path) -> None:
    with pytest.raises(MissingPackage, match="torch"):
        load_runner(str(tiny), LoadConfig(attention="turch"))


def test_the_model_says_what_a_planner_needs(tiny: Path) -> None:
    model = load_runner(str(tiny), LoadConfig(dtype="float32")).model
    assert model.vocab_size == 320
    assert model.max_context_tokens == 512
    assert model.eos_token_ids == (256, 258)  # of generation_config.json and config.json together
    assert model.kv_bytes_per_token == 2 * 3 * 2 * 8 * 4
    assert model.mapped_bytes == 0


@pytest.mark.skipif(detect_instructions() is None, reason="this CPU lacks the instructions of the compiled kernels")
def test_of_the_compiled_pass_it_counts_padding_and_packed_weights(tiny: Path) -> None:
    model = load_runner(str(tiny), LoadConfig(device="cpu", quantization="int8")).model
    assert model.kv_bytes_per_token == 3 * 2 * (8 + 16) * 2  # a value of 8 numbers takes a vector of 16
    assert 100_000 < model.mapped_bytes < 1_000_000


def test_the_fingerprint_tells_number_formats_and_weights_apart(tiny: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny, tmp_path / "fine-tune")
    change_last_layer(other / "model.safetensors")

    def fingerprint(folder: Path, dtype: str) -> str:
        return load_runner(str(folder), LoadConfig(device="cpu", dtype=dtype)).model.fingerprint

    wanted = {
        (folder, dtype): fingerprint(folder, dtype) for folder in (tiny, other) for dtype in ("float32", "bfloat16")
    }
    assert len(set(wanted.values())) == 4
    assert fingerprint(shutil.copytree(tiny, tmp_path / "copy"), "float32") == wanted[tiny, "float32"]


def change_last_layer(path: Path) -> None:
    """Other weights at the end of a file whose size, header and beginning stay the same."""
    tensors = load_file(path)
    size_bytes, head = path.stat().st_size, path.read_bytes()[: 64 * 1024]
    name = max(name for name in tensors if name.endswith("v_proj.weight"))
    tensors[name] = tensors[name] + 1
    save_file(tensors, path, metadata={"format": "pt"})
    assert path.stat().st_size == size_bytes and path.read_bytes()[: 64 * 1024] == head


@pytest.mark.parametrize(("stored", "expected"), [(torch.float32, "torch"), (torch.float16, "torch")])
def test_weights_that_the_compiled_pass_would_round_are_computed_as_they_are_stored(
    tiny: Path, stored: torch.dtype, expected: str
) -> None:
    change_weights(tiny, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    assert load_runner(str(tiny), LoadConfig(device="cpu")).model.attention == expected
