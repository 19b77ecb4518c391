"""Weight files whose headers contradict themselves are refused, by file and tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from busllm.errors import ModelError
from busllm.model_store.files import scan_folder
from busllm.model_store.gguf_config import model_config
from busllm.model_store.gguf_file import GgufFile
from busllm.model_store.gguf_tokenizer import tokenizer_json
from busllm.model_store.gguf_weights import iter_gguf, row_order
from busllm.model_store.safetensors_weights import iter_safetensors

Header = dict[str, Any]


def with_header(path: Path, change: Callable[[Header], object]) -> Path:
    """Two tensors, "a" (2 x 3) and "b" (4), of float32, under a header that was changed."""
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4)}, path)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    return path


def test_a_header_as_it_should_be_is_read(tmp_path: Path) -> None:
    path = with_header(tmp_path / "model.safetensors", lambda header: None)
    assert {name: tensor.shape for name, tensor in iter_safetensors([path])} == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"data_offsets": [0, 4]}, r"'a' is F32 of shape \[2, 3\], which are 24 bytes; its data_offsets \[0, 4\]"),
        ({"data_offsets": [8, 32]}, "the data_offsets of 'a' and 'b' overlap"),
        ({"data_offsets": [-4, 20]}, "entry of 'a' is not understood"),
        ({"data_offsets": [24, 0]}, "give it -24"),
        ({"data_offsets": [20, 44]}, "'a' goes past its end"),
        ({"data_offsets": [0]}, "entry of 'a' is not understood"),
        ({"data_offsets": ["0", "24"]}, "entry of 'a' is not understood"),
        ({"dtype": "BF16"}, "which are 12 bytes"),
        ({"dtype": "F33"}, "unknown number format 'F33'"),
        ({"dtype": 7}, "entry of 'a' is not understood"),
        ({"shape": [2, 4]}, "which are 32 bytes"),
        ({"shape": [-2, -3]}, "entry of 'a' is not understood"),
        ({"shape": [2, True, 3]}, "entry of 'a' is not understood"),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(tmp_path: Path, entry: Header, reason: str) -> None:
    path = with_header(tmp_path / "model.safetensors", lambda header: header["a"].update(entry))
    with pytest.raises(ModelError, match=rf"model\.safetensors.*{reason}"):
        dict(iter_safetensors([path]))


@pytest.mark.parametrize(
    "header", [b"", b"[" * 100_000, b"[]", b'{"a": 5}', b'{"a": {}}', b"\xff\xff"], ids=lambda header: header[:8]
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(40))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        dict(iter_safetensors([path]))


@pytest.mark.parametrize("file_name", ["../other/model.safetensors", "/etc/passwd", "a/../../x.safetensors", None, 7])
def test_an_index_that_names_a_file_outside_the_folder_is_refused(tmp_path: Path, file_name: object) -> None:
    (tmp_path / "other").mkdir()
    with_header(tmp_path / "other" / "model.safetensors", lambda header: None)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file_name}}))
    with pytest.raises(ModelError, match=r"index\.json says that 'a' is in .*, which is no file of this folder"):
        scan_folder(folder, "model")


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"add_head_count": 0}, r"llama\.attention\.head_count = 0"),
        ({"add_head_count": 2}, r"head_count_kv asks for 64 rows in 'blk\.0\.attn_k\.weight', which has 32"),
        ({"add_head_count_kv": 0}, r"llama\.attention\.head_count_kv = 0"),
        ({"add_head_count_kv": 3}, r"head_count_kv asks for 48 rows in 'blk\.0\.attn_k\.weight', which has 32"),
        ({"add_head_count_kv": 2**32 - 1}, r"head_count_kv = 4294967295"),
        ({"add_block_count": 0}, r"llama\.block_count = 0"),
        ({"add_block_count": 2**31 - 1}, r"llama\.block_count = 2147483647 and the tensors of 1 layers"),
        ({"add_context_length": 0}, r"llama\.context_length = 0"),
        ({"add_rope_freq_base": 0.0}, r"llama\.rope\.freq_base = 0\.0"),
        ({"add_rope_freq_base": float("nan")}, r"llama\.rope\.freq_base = nan"),
        ({"add_layer_norm_rms_eps": float("inf")}, r"layer_norm_rms_epsilon = inf"),
    ],
    ids=str,
)
def test_numbers_of_a_gguf_that_its_tensors_contradict_are_refused(write_gguf, extra, reason) -> None:
    path = write_gguf(extra=extra)
    with pytest.raises(ModelError, match=rf"tiny\.gguf.*{reason}"):
        model_config(GgufFile(path))
    with pytest.raises(ModelError, match=reason):
        dict(iter_gguf(path))


def test_a_gguf_without_an_embedding_is_refused(write_gguf, hf_weights) -> None:
    del hf_weights["token_embd.weight"]
    with pytest.raises(ModelError, match=r"no tensor 'token_embd\.weight'"):
        model_config(GgufFile(write_gguf(tensors=hf_weights)))


def test_a_gguf_whose_first_token_is_none_of_its_vocabulary_is_refused(write_gguf) -> None:
    path = write_gguf(extra={"add_bos_token_id": 4000, "add_add_bos_token": True})
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.bos_token_id = 4000; a whole number between 0 and"):
        tokenizer_json(GgufFile(path))


def test_rows_that_are_not_those_of_so_many_heads_are_refused() -> None:
    with pytest.raises(ModelError, match="192 rows"):
        row_order(192, 9 * 10)


def test_random_bytes_in_a_header_give_a_model_or_a_refusal(write_gguf) -> None:
    path = write_gguf()
    content = path.read_bytes()
    end = content.index(b"blk.0.attn_output.weight") + 40
    numbers = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for position in numbers.integers(4, end, numbers.integers(1, 4)):
            damaged[position] = numbers.integers(256)
        path.write_bytes(damaged)
        try:
            file = GgufFile(path)
            model_config(file)
            tokenizer_json(file)
            dict(iter_gguf(path))
        except ModelError:
            refused += 1
    assert 30 < refused < 300
