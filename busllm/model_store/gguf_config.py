"""`config.json` and `generation_config.json` of a GGUF file, from its metadata.

Owns: which architectures a GGUF may have, and the Hugging Face name of each of their numbers (keys are described in
ggml's docs/gguf.md).
Does not know: how the engine reads a configuration, and the tensors' values (it asks only which there are, except for
the rope factors, which stand nowhere else).
Next on the path: `derive.py` writes both files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from busllm.errors import ModelError
from busllm.model_store.config_values import ConfigValues
from busllm.model_store.gguf_file import GgufFile

# GGUF architecture → (Hugging Face model_type, class)
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}

_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Llama 3.1 and later: a GGUF has the resulting factor of each frequency, not the four numbers that made them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT_TOKENS = 1.0, 4.0, 8192


def architecture(file: GgufFile) -> str:
    """The file's architecture.

    Raises:
        ModelError: one that cannot be served from GGUF.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"{file.path} has the architecture {name!r}; from GGUF these can be served: {known}. "
            "Take the model's safetensors instead."
        )
    return name


def model_config(file: GgufFile) -> dict[str, Any]:
    """Makes the content of `config.json`.

    Raises:
        ModelError: an architecture or a rope that cannot be served, or a number that is absent.
    """
    arch = architecture(file)
    numbers = _Numbers(file, arch)
    model_type, class_name = ARCHITECTURES[arch]
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor 'token_embd.weight'.")
    hidden_size, num_heads = numbers.count("embedding_length"), numbers.count("attention.head_count")
    num_layers, num_kv_heads = numbers.count("block_count"), numbers.count("attention.head_count_kv", num_heads)
    head_dim = numbers.count("attention.key_length", hidden_size // num_heads)
    if (rotary := numbers.count("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(f"{file.path} rotates {rotary} of {head_dim} dimensions; only whole heads can be served.")
    _check_shape(file, arch, num_layers, {"head_count": num_heads * head_dim, "head_count_kv": num_kv_heads * head_dim})
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": numbers.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": numbers.count("context_length"),
        "rms_norm_eps": numbers.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": numbers.real("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    config["rope_scaling"] = _rope_scaling(file, numbers, config)
    if arch == "qwen3moe":
        config |= {
            "num_experts": numbers.count("expert_count"),
            "num_experts_per_tok": numbers.count("expert_used_count"),
            "moe_intermediate_size": numbers.count("expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Makes the content of `generation_config.json`: every token that ends a turn."""
    ends = [file.metadata[key] for key in _EOS_KEYS if key in file.metadata]
    values = {
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ends)) or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in values.items() if value is not None}


def _check_shape(file: GgufFile, arch: str, num_layers: int, num_rows: Mapping[str, int]) -> None:
    """Checks what the metadata says about layers and heads against the tensors, which are read by it."""
    stored = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if len(stored) != num_layers:
        raise ModelError(f"{file.path} has {arch}.block_count = {num_layers} and the tensors of {len(stored)} layers.")
    for name, key in {"attn_q": "head_count", "attn_k": "head_count_kv"}.items():
        tensor = file.tensors.get(f"blk.0.{name}.weight")
        if tensor is not None and tensor.shape[0] != num_rows[key]:
            raise ModelError(
                f"{file.path}: {arch}.attention.{key} asks for {num_rows[key]} rows in 'blk.0.{name}.weight', "
                f"which has {tensor.shape[0]}."
            )


class _Numbers:
    """The numbers of one architecture, whose keys begin with its name."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self._file = file
        self._arch = arch

    def _find(self, key: str) -> Any:
        return self._file.metadata.get(f"{self._arch}.{key}")

    def _or_default(self, key: str, value: Any, default: float | None) -> Any:
        if value is None and default is None:
            raise ModelError(f"{self._file.path} does not say {self._arch}.{key}.")
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        value = self._find(key)
        if isinstance(value, list):
            if not value or any(one != value[0] for one in value):
                raise ModelError(f"{self._file.path}: {self._arch}.{key} differs between layers, which is not served.")
            value = value[0]
        name = f"{self._arch}.{key}"
        return ConfigValues({name: self._or_default(key, value, default)}, str(self._file.path)).whole(name)

    def real(self, key: str, default: float | None = None) -> float:
        # The shortest decimal that is the same float32: 1e-05, where the file's bytes read 9.999999747378752e-06.
        name = f"{self._arch}.{key}"
        value = ConfigValues({name: self._or_default(key, self._find(key), default)}, str(self._file.path)).real(name)
        return float(str(np.float32(value)))

    def text(self, key: str) -> str | None:
        value = self._find(key)
        return None if value is None else str(value)


def _rope_scaling(file: GgufFile, numbers: _Numbers, config: dict[str, Any]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, config)
    kind = numbers.text("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path} scales its rope by {kind!r}; none, linear, yarn and Llama 3 can be served.")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": numbers.real("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = numbers.count("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Finds the numbers behind Llama 3's rope factors and checks that they give the factors of the file."""
    factors = file.dequantize("rope_freqs.weight")
    # [head_dim / 2]; the lowest frequencies are divided by the whole factor.
    factor = float(factors.max())
    head_dim, theta = config["head_dim"], config["rope_theta"]
    wave_lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (_LLAMA3_CONTEXT_TOKENS / wave_lengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    expected = 1 / ((1 - np.clip(smooth, 0, 1)) / factor + np.clip(smooth, 0, 1))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(f"{file.path} has rope factors that are not those of Llama 3; take the model's safetensors.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT_TOKENS,
    }
