"""A whole model, packed: which matrices there are and how a checkpoint's tensors become them.

Owns: `PackedModel`, and packing it from named tensors.
Does not know: files (`packed_file.py` keeps one on disk), sequences.
Next on the path: `cpu_decoder.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Protocol, assert_never

import numpy as np
import numpy.typing as npt

from busllm.engine.cpu.blocks import Blocks, own_format, quantise, read_blocks
from busllm.engine.cpu.pack import aligned_zeros, pack
from busllm.engine.cpu.shapes import GROUP, VECTOR, Format, Part, padded
from busllm.engine.models.config import ModelConfig
from busllm.model_store.weights import WeightTensor

Quantization = Literal["auto", "none", "int8", "int4"]
Parts = Mapping[str, tuple[int, int]]  # what stands in one matrix, one below the other: names and shapes
EMBEDDING, HEAD, ROUTERS = "embedding", "head", "routers"


class TensorSource(Protocol):
    """Hands out a checkpoint's tensors and keeps account of them."""

    def has(self, name: str) -> bool:
        """Whether a tensor is there, for those that a model may go without."""
        ...

    def find(self, name: str, shape: tuple[int, ...]) -> WeightTensor | None:
        """The tensor, or None (noted) when it is missing or has another shape."""
        ...

    def not_finite(self, name: str) -> None:
        """Notes a tensor with values that are no numbers."""
        ...


@dataclass(frozen=True)
class PackedModel:
    """Arrays by name, and what they are.

    Attributes:
        formats: of each matrix: "embedding", "head" (absent where the embedding is it), "<layer>.<part>".
        arrays: `<matrix>.weights` uint8 (tiles, groups, bytes), `<matrix>.bias` float32, `<matrix>.outliers` int64
            where some inputs are kept apart; "norms", "head_norms", with experts "routers", as in `shapes.Model`.
    """

    formats: Mapping[str, Format]
    arrays: Mapping[str, npt.NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def label(self) -> str:
        """The formats that occur, for people and fingerprints."""
        return "+".join(sorted({kind.name.lower() for kind in self.formats.values()}))


def matrix_name(layer: int, part: Part) -> str:
    """Name of a layer's matrix."""
    return f"{layer}.{part.name.lower()}"


class Packer:
    """Packs one model.

    Args:
        config: what the checkpoint must have.
        source: of its tensors; what is missing becomes zeros, and the source knows.
        quantization: "auto" = as stored; "none" = bfloat16; "int8"; "int4" (embedding and head in int8).
    """

    def __init__(self, config: ModelConfig, source: TensorSource, quantization: Quantization) -> None:
        self._config = config
        self._source = source
        self._quantization = quantization
        self._formats: dict[str, Format] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def pack(self) -> PackedModel:
        """Reads and packs all tensors.

        Raises:
            ModelError: a tensor cannot be decoded.
        """
        config = self._config
        table = (config.vocab_size, config.hidden_size)
        self._matrix(EMBEDDING, {"model.embed_tokens": table}, has_bias=False)
        if not config.tie_word_embeddings or self._stores_another_head(table):
            self._matrix(HEAD, {"lm_head": table}, has_bias=False)
        for layer in range(config.num_layers):
            self._layer(layer, f"model.layers.{layer}.")
        self._norms()
        self._routers()
        return PackedModel(self._formats, self._arrays)

    def _stores_another_head(self, table: tuple[int, int]) -> bool:
        """Whether a model whose embedding is to be the head has one besides, of other values."""
        if not self._source.has("lm_head.weight"):
            return False
        embedding, head = (self._source.find(f"{name}.weight", table) for name in ("model.embed_tokens", "lm_head"))
        if embedding is None or head is None:
            return False  # the source has noted it
        if embedding.quantization == head.quantization:
            return not np.array_equal(embedding.raw, head.raw)
        return not np.array_equal(embedding.to_float32(), head.to_float32())

    def _layer(self, layer: int, prefix: str) -> None:
        config = self._config
        hidden = config.hidden_size
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = prefix + "self_attn."
        sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self._matrix(
            matrix_name(layer, Part.QUERIES_KEYS_VALUES),
            {attention + name: (size, hidden) for name, size in sizes.items()},
            has_bias=config.qkv_bias,
            unit=1,
        )
        self._matrix(
            matrix_name(layer, Part.ATTENTION_OUTPUT),
            {attention + "o_proj": (hidden, query_size)},
            has_bias=config.output_bias,
        )
        self._feed_forward(layer, prefix + "mlp.")

    def _feed_forward(self, layer: int, prefix: str) -> None:
        """The matrices of a dense layer, or those of all experts, one after the other."""
        config, experts = self._config, self._config.experts
        hidden, inner, prefixes = config.hidden_size, config.intermediate_size, [prefix]
        if experts is not None and layer in experts.layers:
            inner = experts.intermediate_size
            prefixes = [f"{prefix}experts.{index}." for index in range(experts.num_experts)]
        self._stack(
            matrix_name(layer, Part.GATE_UP),
            [{each + name: (inner, hidden) for name in ("gate_proj", "up_proj")} for each in prefixes],
            has_bias=config.mlp_bias,
            unit=GROUP,  # the gate is the input of the next linear
        )
        self._stack(
            matrix_name(layer, Part.DOWN),
            [{each + "down_proj": (hidden, inner)} for each in prefixes],
            has_bias=config.mlp_bias,
        )

    def _matrix(self, name: str, parts: Parts, *, has_bias: bool, unit: int = VECTOR) -> None:
        self._stack(name, [parts], has_bias=has_bias, unit=unit)

    def _stack(self, name: str, matrices: Sequence[Parts], *, has_bias: bool, unit: int = VECTOR) -> None:
        """Matrices of one shape and one format; one at a time is expanded."""
        found = [
            {part: self._source.find(f"{part}.weight", shape) for part, shape in parts.items()} for parts in matrices
        ]
        kind = self._format(name, [tensor for each in found for tensor in each.values() if tensor is not None])
        packed = (pack(self._blocks(*each, kind), unit) for each in zip(matrices, found, strict=True))
        weights = next(packed)
        if len(matrices) > 1:
            whole = aligned_zeros((len(matrices), *weights.shape), np.uint8)
            for index, each in enumerate(chain((weights,), packed)):
                whole[index] = each
            weights = whole.reshape(-1, *weights.shape[1:])
        self._formats[name] = kind
        self._arrays[f"{name}.weights"] = weights
        self._arrays[f"{name}.bias"] = np.concatenate([self._biases(parts, has_bias, unit) for parts in matrices])

    def _blocks(self, parts: Parts, tensors: Mapping[str, WeightTensor | None], kind: Format) -> list[Blocks]:
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is noted by its name
            blocks = [
                quantise(np.zeros(parts[part], np.float32), kind) if tensor is None else read_blocks(tensor, kind)
                for part, tensor in tensors.items()
            ]
        for part, its_blocks in zip(parts, blocks, strict=True):
            if not its_blocks.is_finite:
                self._source.not_finite(f"{part}.weight")
        return blocks

    def _biases(self, parts: Parts, has_bias: bool, unit: int) -> npt.NDArray[np.float32]:
        bias = np.concatenate([self._bias(part, shape[0], has_bias, unit) for part, shape in parts.items()])
        return np.pad(bias, (0, padded(len(bias), VECTOR) - len(bias)))

    def _format(self, name: str, tensors: Sequence[WeightTensor]) -> Format:
        match self._quantization:
            case "auto":
                return own_format(tensors)
            case "none":
                return Format.BFLOAT16
            case "int8":
                return Format.INT8
            case "int4":
                return Format.INT8 if name in (EMBEDDING, HEAD) else Format.INT4
            case _:
                assert_never(self._quantization)

    def _bias(self, part: str, size: int, has_bias: bool, unit: int) -> npt.NDArray[np.float32]:
        out = np.zeros(padded(size, unit), np.float32)
        if has_bias:
            out[:size] = self._floats(f"{part}.bias", (size,))
        return out

    def _floats(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        tensor = self._source.find(name, shape)
        values = np.zeros(shape, np.float32) if tensor is None else tensor.to_float32()
        if not np.isfinite(values).all():
            self._source.not_finite(name)
        return values

    def _norms(self) -> None:
        config = self._config
        names = [
            f"model.layers.{layer}.{norm}"
            for layer in range(config.num_layers)
            for norm in ("input_layernorm", "post_attention_layernorm")
        ]
        norms = np.zeros((len(names) + 1, padded(config.hidden_size, GROUP)), np.float32)
        for row, name in enumerate([*names, "model.norm"]):
            norms[row, : config.hidden_size] = self._floats(f"{name}.weight", (config.hidden_size,))
        self._arrays["norms"] = norms
        num_layers = config.num_layers if config.qk_norm else 0
        heads = np.zeros((num_layers, 2, config.head_dim), np.float32)
        for layer in range(num_layers):
            for index, name in enumerate(("q_norm", "k_norm")):
                full = f"model.layers.{layer}.self_attn.{name}.weight"
                heads[layer, index] = self._floats(full, (config.head_dim,))
        self._arrays["head_norms"] = heads

    def _routers(self) -> None:
        config, experts = self._config, self._config.experts
        if experts is None:
            return
        shape = (experts.num_experts, config.hidden_size)
        routers = aligned_zeros((config.num_layers, shape[0], padded(shape[1], GROUP)), np.float32)
        for layer in sorted(experts.layers):
            routers[layer, :, : shape[1]] = self._floats(f"model.layers.{layer}.mlp.gate.weight", shape)
        self._arrays[ROUTERS] = routers
