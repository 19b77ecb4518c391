"""What a step has to do at least: bytes that it reads, products that it adds up.

Owns: the counts, from the packed model and the step's rows alone; they are the same on every machine.
Does not know: how fast a machine is (`peaks.py`), how a step is computed.

Left out is what is small: norms, rotation, activations, softmax, rounding of states, states between the linears,
routers; and rows are taken to choose the same experts, so that no more weights are read. So the counts are below what a
step does, never above.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from fractions import Fraction
from typing import NamedTuple

import msgspec

from busllm.engine.cpu.packed_model import EMBEDDING, HEAD, PackedModel, matrix_name
from busllm.engine.cpu.shapes import GROUP, VECTOR, Format, Part
from busllm.engine.models.config import ModelConfig

_KV_BYTES = 2  # of a number of the cache: bfloat16


class Product(Enum):
    """What is multiplied, by the number format of the states."""

    INT8 = "int8"
    BFLOAT16 = "bfloat16"


class Rows(NamedTuple):
    """One sequence in a step: `num_tokens` from position `start` on."""

    sequence: int
    start: int
    num_tokens: int


class Work(msgspec.Struct, frozen=True):
    """Of one step.

    Attributes:
        weight_bytes: packed weights and biases, each once; of experts as many as one token goes through.
        kv_bytes: keys and values of every position up to the last one, each once: read, or written by this step.
        multiply_adds: by number format of the states, whose instruction computes them. Outputs and inputs count as
            they are packed, padding included.
    """

    weight_bytes: int
    kv_bytes: int
    multiply_adds: Mapping[Product, int]


def work_of(config: ModelConfig, packed: PackedModel, rows: Sequence[Rows]) -> Work:
    """Counts a step.

    Args:
        rows: sequences of the step; the last token of each goes through the head.
    """
    num_tokens = sum(row.num_tokens for row in rows)
    head = HEAD if HEAD in packed.formats else EMBEDDING
    used: list[tuple[str, int, Fraction]] = [
        (matrix_name(layer, part), num_tokens, _used_share(config, layer, part))
        for layer in range(config.num_layers)
        for part in Part
    ]
    used.append((head, len(rows), Fraction(1)))
    multiply_adds: Counter[Product] = Counter()
    for name, times, share in used:
        product = Product.BFLOAT16 if packed.formats[name] is Format.BFLOAT16 else Product.INT8
        multiply_adds[product] += times * int(share * _num_weights(packed, name))
    multiply_adds[Product.BFLOAT16] += _attention(config, rows)
    per_position = 2 * config.num_kv_heads * config.head_dim * _KV_BYTES
    return Work(
        weight_bytes=sum(int(share * _num_bytes(packed, name)) for name, _, share in used),
        kv_bytes=sum(_num_positions(row, window) for row in rows for window in config.layer_windows) * per_position,
        multiply_adds=dict(multiply_adds),
    )


def _used_share(config: ModelConfig, layer: int, part: Part) -> Fraction:
    """What one token needs of a layer's matrix: of those of all experts, those of its own."""
    experts = config.experts
    if experts is None or layer not in experts.layers or part not in (Part.GATE_UP, Part.DOWN):
        return Fraction(1)
    return Fraction(experts.experts_per_token, experts.num_experts)


def _num_weights(packed: PackedModel, name: str) -> int:
    num_tiles, num_groups = packed.arrays[f"{name}.weights"].shape[:2]
    return int(num_tiles * VECTOR * num_groups * GROUP)


def _num_bytes(packed: PackedModel, name: str) -> int:
    return packed.arrays[f"{name}.weights"].nbytes + packed.arrays[f"{name}.bias"].nbytes


def _num_positions(row: Rows, window: int | None) -> int:
    """Positions that one layer has to do with: those that any token of the row sees."""
    first_seen = 0 if window is None else max(0, row.start - window + 1)
    return row.start + row.num_tokens - first_seen


def _attention(config: ModelConfig, rows: Sequence[Rows]) -> int:
    """Scores and weighted values of all layers; each token sees itself and what is before it."""
    num_seen = sum(
        position + 1 if window is None else min(position + 1, window)
        for window in config.layer_windows
        for row in rows
        for position in range(row.start, row.start + row.num_tokens)
    )
    return 2 * num_seen * config.num_heads * config.head_dim
