"""Weights of a GGUF file under their Hugging Face names and in Hugging Face's row order.

Owns: the name map, the un-permutation of query and key rows, and the split of stacked experts.
Does not know: the container (`gguf_file.py`), torch.
Next on the path: `weights.py`, through which the engine reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from busllm.errors import ModelError
from busllm.model_store.gguf_config import architecture, model_config
from busllm.model_store.gguf_file import GgufFile, GgufTensor, dequantize
from busllm.model_store.tensor_part import WHOLE, TensorPart

_TOP_NAMES: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
_BLOCK_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
    }
)
_EXPERT_NAMES: Mapping[str, str] = MappingProxyType(
    {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
)
# Not weights: what they say stands in the configuration (`gguf_config.py`).
_SKIPPED = frozenset({"rope_freqs.weight"})
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<suffix>weight|bias)")
_PLAIN_FORMATS: Mapping[GGMLQuantizationType, str] = MappingProxyType(
    {
        GGMLQuantizationType.F32: "float32",
        GGMLQuantizationType.F16: "float16",
        GGMLQuantizationType.BF16: "bfloat16",
    }
)


class GgufWeight:
    """A `WeightTensor` of a GGUF file.

    Args:
        tensor: as the file holds it.
        row_order: row i of the result is row `row_order[i]` of the file; None = the file's own order.
    """

    def __init__(self, tensor: GgufTensor, row_order: np.ndarray[Any, np.dtype[np.intp]] | None = None) -> None:
        self._tensor = tensor
        self._row_order = row_order

    @property
    def shape(self) -> tuple[int, ...]:
        return self._tensor.shape

    @property
    def quantization(self) -> str:
        kind = self._tensor.quantization
        return _PLAIN_FORMATS.get(kind, kind.name.lower())

    @property
    def raw(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        # Blocks never cross a row, so that rows can be moved without decoding them.
        rows: np.ndarray[Any, np.dtype[np.uint8]] = self._tensor.raw
        if self._row_order is None:
            return rows
        # A bias is one stored row, whose values are moved.
        values = rows.reshape(self.shape[0], -1)
        moved: np.ndarray[Any, np.dtype[np.uint8]] = values[self._row_order].reshape(rows.shape)
        return moved

    def to_float32(self, part: TensorPart = WHOLE) -> np.ndarray[Any, np.dtype[np.float32]]:
        kind = self._tensor.quantization
        if len(self.shape) != 2:
            return dequantize(self.raw, kind).reshape(self.shape)[part.rows]
        rows = self._tensor.raw[part.rows if self._row_order is None else self._row_order[part.rows]]
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        first, end, _ = part.columns.indices(self.shape[1])
        first_block, end_block = first // block_values, -(-end // block_values)
        # Blocks are decoded as wholes, so the values at both ends may be more than is wanted.
        values = dequantize(rows[:, first_block * block_bytes : end_block * block_bytes], kind)
        skipped = first_block * block_values
        return values[:, first - skipped : end - skipped]


def iter_gguf(path: Path) -> Iterator[tuple[str, GgufWeight]]:
    """All weights of one file.

    Yields:
        (Hugging Face name, tensor), experts one by one.

    Raises:
        ModelError: damaged, or a tensor whose meaning is not known.
    """
    with GgufFile(path) as file:
        permutes = architecture(file) == "llama"
        config = model_config(file)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        for name, tensor in file.tensors.items():
            if name in _SKIPPED:
                continue
            match = _NAME.fullmatch(name)
            if match is None:
                raise ModelError(f"{path} has the tensor {name!r}, which is not known.")
            layer, stem, suffix = match["layer"], match["stem"], match["suffix"]
            if layer is None and stem in _TOP_NAMES:
                yield f"{_TOP_NAMES[stem]}.{suffix}", GgufWeight(tensor)
            elif layer is not None and stem in _BLOCK_NAMES:
                order = row_order(tensor.shape[0], heads[stem]) if permutes and stem in heads else None
                yield f"model.layers.{layer}.{_BLOCK_NAMES[stem]}.{suffix}", GgufWeight(tensor, order)
            elif layer is not None and stem in _EXPERT_NAMES:
                yield from _experts(f"model.layers.{layer}.mlp.experts", f"{_EXPERT_NAMES[stem]}.{suffix}", tensor)
            else:
                raise ModelError(f"{path} has the tensor {name!r}, which is not known.")


def row_order(num_rows: int, num_heads: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Undoes the permutation of query and key rows that llama.cpp's converter makes for Llama.

    Hugging Face's rope turns dimension i of a head with dimension i + head_dim / 2, llama.cpp's turns neighbours, so
    its converter interleaves the halves of each head. (Qwen files keep the order.)

    Returns:
        intp [num_rows]: row i of Hugging Face's matrix is row `result[i]` of the file.

    Raises:
        ModelError: the rows are not those of so many heads.
    """
    if num_rows % (2 * num_heads):
        raise ModelError(f"{num_rows} rows of queries or keys are not those of {num_heads} heads.")
    halves = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    # [head, pair, half] → [head, half, pair]
    return halves.swapaxes(1, 2).reshape(num_rows)


def _experts(prefix: str, suffix: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufWeight]]:
    # [experts, rows, columns]; raw: [experts * rows, bytes of one row]
    num_experts, *shape = tensor.shape
    num_rows = prod(shape[:-1])
    for expert in range(num_experts):
        rows = tensor.raw[expert * num_rows : (expert + 1) * num_rows]
        yield f"{prefix}.{expert}.{suffix}", GgufWeight(GgufTensor(tensor.quantization, tuple(shape), rows))
