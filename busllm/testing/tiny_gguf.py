"""Tiny models as GGUF files in any block format, beside a checkpoint with exactly the same values.

Owns: the way from Hugging Face's names and row order to ggml's, as llama.cpp's converter takes it, and blocks in
formats that the `gguf` package can read and not write.
Does not know: how busllm reads a file (`model_store`), so it may be tested with this.

Formats with super-blocks of 256 values get random blocks instead of rounded weights: what matters is that both files
hold the same numbers, of the usual size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

from busllm.testing.tiny_architectures import STANDARD_DEVIATION

_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
)
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate": "ffn_gate_inp",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)
# Of each super-block format: where its float16 scale lies, where its float16 minimum, and the minimum for a scale of 1
# with which random blocks have a mean of 0 (the products are of 0 … n - 1 and of 0 … m - 1).
_SUPER_BLOCKS: Mapping[GGMLQuantizationType, tuple[int, int | None, float]] = MappingProxyType(
    {
        GGMLQuantizationType.Q2_K: (80, 82, 1.5),
        GGMLQuantizationType.Q3_K: (108, None, 0.0),
        GGMLQuantizationType.Q4_K: (0, 2, 7.5),
        GGMLQuantizationType.Q5_K: (0, 2, 15.5),
        GGMLQuantizationType.Q6_K: (208, None, 0.0),
    }
)
Array = np.ndarray[Any, np.dtype[Any]]


def write_tiny_gguf(
    directory: Path, path: Path, quantization: GGMLQuantizationType, *, rope_factors: Array | None = None
) -> Path:
    """Writes a checkpoint's model as a GGUF file, and the file's values back into the checkpoint.

    Args:
        directory: from `write_tiny_model`, one safetensors file; its rows must be whole blocks.
        path: of the new file.
        quantization: of all matrices; vectors and routers stay float32, as is usual.
        rope_factors: [head_dim / 2], what Llama 3's frequencies are divided by.

    Returns:
        `path`.
    """
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    writer = GGUFWriter(path, _ARCHITECTURES[config["model_type"]])
    _add_numbers(writer, config)
    _add_tokens(writer, config["vocab_size"])
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    random = np.random.default_rng(0)
    blocks: dict[str, Array] = {}
    for name, values in weights.items():
        if values.ndim > 1 and not name.endswith("mlp.gate.weight"):
            blocks[name] = _blocks(values, quantization, random)
            weights[name] = dequantize(blocks[name], quantization).reshape(values.shape)
    for name, raw, kind in _tensors(config, weights, blocks, quantization):
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return path


def _add_numbers(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_tokens(writer: GGUFWriter, vocab_size: int) -> None:
    """A byte-level vocabulary like that of `write_tiny_tokenizer`, without merges of its own."""
    characters = [chr(value) for value in (*range(33, 127), *range(161, 173), *range(174, 256))]
    characters += [chr(256 + index) for index in range(256 - len(characters))]
    special = ["<|eos|>", "<|start|>", "<|end|>"]
    unused = [f"[unused{index}]" for index in range(vocab_size - len(characters) - len(special))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*characters, *special, *unused])
    writer.add_token_types([1] * len(characters) + [3] * len(special) + [5] * len(unused))
    writer.add_eos_token_id(len(characters))


def _blocks(values: Array, quantization: GGMLQuantizationType, random: np.random.Generator) -> Array:
    """uint8 [rows, bytes of a row] whose values are near `values`, or are as random as these."""
    if quantization not in _SUPER_BLOCKS:
        return quantize(np.ascontiguousarray(values), quantization)
    block_values, block_bytes = GGML_QUANT_SIZES[quantization]
    raw = random.integers(0, 256, (values.size // block_values, block_bytes), dtype=np.uint8)
    scale_at, minimum_at, minimum = _SUPER_BLOCKS[quantization]

    def scale_by(factor: float) -> None:
        raw[:, scale_at : scale_at + 2] = np.array([factor], dtype="<f2").view(np.uint8)
        if minimum_at is not None:
            raw[:, minimum_at : minimum_at + 2] = np.array([factor * minimum], dtype="<f2").view(np.uint8)

    scale_by(1.0)
    scale_by(STANDARD_DEVIATION / float(dequantize(raw, quantization).std()))
    return raw.reshape(values.shape[0], -1)


def _tensors(
    config: Mapping[str, Any], weights: Mapping[str, Array], blocks: Mapping[str, Array], kind: GGMLQuantizationType
) -> Iterator[tuple[str, Array, GGMLQuantizationType]]:
    """ggml's names, its order of rows, and the experts of a layer as one tensor."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    permutes = _ARCHITECTURES[config["model_type"]] == "llama"
    experts: dict[str, list[Array]] = {}
    for name, values in weights.items():
        raw, own_kind = (blocks[name], kind) if name in blocks else (values, GGMLQuantizationType.F32)
        stem, _, suffix = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        if stem.startswith("mlp.experts."):
            projection = stem.rsplit(".", 1)[1].removesuffix("_proj")
            experts.setdefault(f"{prefix}ffn_{projection}_exps.{suffix}", []).append(raw)
            continue
        stem = _NAMES[stem]
        if permutes and stem in heads:
            raw = interleave(raw, heads[stem])
        yield f"{prefix}{stem}.{suffix}", raw, own_kind
    for name, parts in experts.items():
        yield name, np.stack(parts), kind


def interleave(rows: Array, num_heads: int) -> Array:
    """The order of a Llama's query and key rows in GGUF: the halves of each head, alternating."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
