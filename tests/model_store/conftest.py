"""Tiny GGUF files, written by the `gguf` package as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 4, 2, 16, 96
TOKENS = ["<|end|>", "<|start|>", *"abcdefgh0123", "Ġ", "ab", "abc", "Ġa", "<tool>"]
TOKEN_TYPES = [3, 3] + [1] * 16 + [4]
MERGES = ["a b", "ab c", "Ġ a"]

WriteGguf = Callable[..., Path]


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Llama's query and key rows (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return (
        rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def hugging_face_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """The weights that a converter would read: float32, Hugging Face's order."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    return {
        "token_embd.weight": normal(len(TOKENS), HIDDEN),
        "blk.0.attn_norm.weight": normal(HIDDEN),
        "blk.0.attn_q.weight": normal(HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_q.bias": normal(HEADS * HEAD_DIM),
        "blk.0.attn_k.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": normal(HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": normal(HIDDEN),
        "blk.0.ffn_gate.weight": normal(INTERMEDIATE, HIDDEN),
        "blk.0.ffn_up.weight": normal(INTERMEDIATE, HIDDEN),
        "blk.0.ffn_down.weight": normal(HIDDEN, INTERMEDIATE),
        "output_norm.weight": normal(HIDDEN),
    }


def write_tiny_gguf(
    path: Path,
    *,
    arch: str = "llama",
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    quantization: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    pre: str = "smollm",
) -> Path:
    writer = GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TOKEN_TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for key, value in (extra or {}).items():
        getattr(writer, key)(value)
    for name, values in (hugging_face_weights() if tensors is None else tensors).items():
        if arch == "llama" and ".attn_q." in name:
            values = interleave(values, HEADS)
        if arch == "llama" and ".attn_k." in name:
            values = interleave(values, KV_HEADS)
        if values.ndim > 1:
            writer.add_tensor(name, quantize(values, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Writes a tiny GGUF file: `write_gguf(arch=…, extra={writer method: value}, …) -> path`."""

    def write(name: str = "tiny.gguf", **options: Any) -> Path:
        return write_tiny_gguf(tmp_path / name, **options)

    return write


@pytest.fixture
def hf_weights() -> dict[str, np.ndarray]:
    """The weights of the tiny file, in Hugging Face's order, by their GGUF names."""
    return hugging_face_weights()
