"""Weights through the one interface: GGUF and safetensors give the same tensors as the model's author had."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import save_file

from busllm.errors import ModelError
from busllm.model_store.files import ModelFiles, scan_folder
from busllm.model_store.gguf_weights import iter_gguf
from busllm.model_store.tensor_part import TensorPart
from busllm.model_store.weights import iter_tensors


def test_query_and_key_rows_of_a_llama_file_come_in_hugging_face_order(write_gguf, hf_weights):
    tensors = dict(iter_gguf(write_gguf(quantization=GGMLQuantizationType.Q8_0)))
    for name, gguf_name in {
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.self_attn.q_proj.bias": "blk.0.attn_q.bias",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    }.items():
        assert tensors[name].shape == hf_weights[gguf_name].shape
        np.testing.assert_allclose(tensors[name].to_float32(), hf_weights[gguf_name], atol=0.02)


def test_query_and_key_rows_of_a_qwen_file_stay_as_they_are(write_gguf, hf_weights):
    tensors = dict(iter_gguf(write_gguf(arch="qwen2")))
    query = tensors["model.layers.0.self_attn.q_proj.weight"].to_float32()
    np.testing.assert_allclose(query, hf_weights["blk.0.attn_q.weight"], atol=0.02)


def test_raw_rows_are_moved_as_the_values_are(write_gguf):
    from busllm.model_store.gguf_file import dequantize

    for _, weight in iter_gguf(write_gguf(quantization=GGMLQuantizationType.Q4_1)):
        kind = GGMLQuantizationType.Q4_1 if weight.quantization == "q4_1" else GGMLQuantizationType.F32
        values = dequantize(weight.raw, kind).reshape(weight.shape)
        assert np.array_equal(values, weight.to_float32())


def test_every_tensor_gets_its_hugging_face_name_and_format(write_gguf):
    formats = {name: weight.quantization for name, weight in iter_gguf(write_gguf())}
    layer = "model.layers.0."
    assert formats == {
        "model.embed_tokens.weight": "q8_0",
        layer + "input_layernorm.weight": "float32",
        layer + "self_attn.q_proj.weight": "q8_0",
        layer + "self_attn.q_proj.bias": "float32",
        layer + "self_attn.k_proj.weight": "q8_0",
        layer + "self_attn.v_proj.weight": "q8_0",
        layer + "self_attn.o_proj.weight": "q8_0",
        layer + "post_attention_layernorm.weight": "float32",
        layer + "mlp.gate_proj.weight": "q8_0",
        layer + "mlp.up_proj.weight": "q8_0",
        layer + "mlp.down_proj.weight": "q8_0",
        "model.norm.weight": "float32",
    }


def test_stacked_experts_come_one_by_one(write_gguf, hf_weights):
    experts = np.random.default_rng(1).standard_normal((3, 32, 64)).astype(np.float32)
    path = write_gguf(
        arch="qwen3moe",
        tensors=hf_weights | {"blk.0.ffn_up_exps.weight": experts},
        extra={"add_expert_count": 3, "add_expert_used_count": 2, "add_expert_feed_forward_length": 32},
    )
    tensors = dict(iter_gguf(path))
    for expert in range(3):
        weight = tensors[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"]
        assert weight.shape == (32, 64)
        np.testing.assert_allclose(weight.to_float32(), experts[expert], atol=0.02)


def test_a_tensor_that_is_not_understood_is_an_error_and_not_left_out(write_gguf, hf_weights):
    path = write_gguf(tensors=hf_weights | {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    with pytest.raises(ModelError, match="attn_sinks"):
        list(iter_gguf(path))


def _save(path: Path, **tensors: torch.Tensor) -> None:
    save_file(tensors, path)


def test_safetensors_values_are_exact_in_every_float_format(tmp_path: Path):
    values = torch.randn(5, 8)
    saved = {"a": values, "b": values.to(torch.bfloat16), "c": values.to(torch.float16), "d": values[0].bfloat16()}
    save_file(saved, tmp_path / "model.safetensors")
    tensors = dict(iter_tensors(scan_folder(tmp_path, "x")))
    assert {name: weight.quantization for name, weight in tensors.items()} == {
        "a": "float32",
        "b": "bfloat16",
        "c": "float16",
        "d": "bfloat16",
    }
    for name, weight in tensors.items():
        assert weight.shape == tuple(saved[name].shape)
        assert np.array_equal(weight.to_float32(), saved[name].float().numpy())
    assert tensors["b"].raw.shape == (5, 16)


PARTS = (
    TensorPart(),
    TensorPart(rows=slice(3, 7)),
    TensorPart(columns=slice(8, 48)),  # begins and ends within a block
    TensorPart(slice(0, 5), slice(32, 64)),
)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("quantization", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0])
def test_a_part_of_a_gguf_tensor_is_that_part_of_the_whole(write_gguf, part, quantization):
    for name, weight in iter_gguf(write_gguf(quantization=quantization)):
        assert_part(name, weight, part)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_safetensors_tensor_is_that_part_of_the_whole(tmp_path: Path, part):
    values = torch.randn(16, 64)
    save_file(
        {"a": values, "b": values.bfloat16(), "c": values.half(), "d": values[0].bfloat16()}, tmp_path / "a.safetensors"
    )
    for name, weight in iter_tensors(scan_folder(tmp_path, "x")):
        assert_part(name, weight, part)


def assert_part(name, weight, part):
    whole = weight.to_float32()
    expected = whole[part.rows] if whole.ndim == 1 else whole[part.rows, part.columns]
    values = weight.to_float32(part)
    assert values.shape == part.shape_of(weight.shape), name
    assert np.array_equal(values, expected), name


def test_only_the_shards_that_the_index_lists_are_read(tmp_path: Path):
    _save(tmp_path / "model-1.safetensors", a=torch.ones(2))
    _save(tmp_path / "model-2.safetensors", b=torch.ones(2))
    _save(tmp_path / "adapter.safetensors", c=torch.ones(2))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [name for name, _ in iter_tensors(scan_folder(tmp_path, "x"))] == ["a", "b"]
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors is absent"):
        scan_folder(tmp_path, "x")


@pytest.mark.parametrize("num_bytes", [4, 60, 160])
def test_a_safetensors_file_that_is_cut_short_is_refused(tmp_path: Path, num_bytes: int):
    path = tmp_path / "model.safetensors"
    _save(path, a=torch.ones(64), b=torch.ones(64))
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match="Fetch it again"):
        list(iter_tensors(scan_folder(tmp_path, "x")))


def test_an_integer_tensor_has_no_float_values(tmp_path: Path):
    _save(tmp_path / "model.safetensors", a=torch.ones(4, dtype=torch.int64))
    ((_, weight),) = iter_tensors(scan_folder(tmp_path, "x"))
    with pytest.raises(ModelError, match="I64"):
        weight.to_float32()


def test_the_null_model_has_no_weights():
    with pytest.raises(ModelError, match="no weights"):
        list(iter_tensors(ModelFiles(name="null")))
