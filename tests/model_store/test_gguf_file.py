"""The GGUF container, against the `gguf` package's own reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.constants import GGMLQuantizationType

from busllm.errors import ModelError
from busllm.model_store.gguf_file import GgufFile


@pytest.mark.parametrize(
    "quantization", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16]
)
def test_metadata_and_tensors_are_those_of_the_reference_reader(write_gguf, quantization):
    path = write_gguf(quantization=quantization)
    file, reference = GgufFile(path), GGUFReader(path)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert file.metadata[key] == field.contents()
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        ours = file.tensors[tensor.name]
        assert ours.quantization == tensor.tensor_type
        assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert ours.raw.tobytes() == tensor.data.tobytes()


def test_dequantized_values_are_near_the_original_ones(write_gguf, hf_weights):
    file = GgufFile(write_gguf(quantization=GGMLQuantizationType.Q8_0))
    values = file.dequantize("token_embd.weight")
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, hf_weights["token_embd.weight"], atol=0.02)


def test_an_unknown_tensor_is_an_error(write_gguf):
    with pytest.raises(ModelError, match="no tensor 'nothing'"):
        GgufFile(write_gguf()).dequantize("nothing")


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_refused(write_gguf, share):
    path = write_gguf()
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match="Fetch it again"):
        GgufFile(path)


def test_another_kind_of_file_is_refused(tmp_path: Path):
    path = tmp_path / "not.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        GgufFile(path)


def test_an_empty_and_an_absent_file_are_refused(tmp_path: Path):
    (tmp_path / "empty.gguf").touch()
    for name in ("empty.gguf", "absent.gguf"):
        with pytest.raises(ModelError, match="cannot be opened"):
            GgufFile(tmp_path / name)


def test_an_unknown_version_is_refused_with_the_known_ones(write_gguf):
    path = write_gguf()
    content = bytearray(path.read_bytes())
    content[4:8] = (3).to_bytes(4, "big")
    path.write_bytes(content)
    with pytest.raises(ModelError, match="versions 2 and 3"):
        GgufFile(path)
