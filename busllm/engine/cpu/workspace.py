"""Working memory of a step.

Owns: the widths of its arrays.
Does not know: when it grows (`cpu_decoder.py`).
"""

from __future__ import annotations

import numpy as np

from busllm.engine.cpu.pack import aligned_zeros
from busllm.engine.cpu.shapes import GROUP, MOST_OUTLIERS, VECTOR, Array, Mixture, Part, Workspace, padded
from busllm.engine.cpu.threads import num_threads
from busllm.engine.cpu.tiles import BFLOAT16_INPUT_BYTES
from busllm.engine.models.config import ModelConfig


def gate_size(config: ModelConfig) -> int:
    """Padded width of the dense feed-forward layers; 0 where all layers have experts."""
    are_all_sparse = config.experts is not None and len(config.experts.layers) == config.num_layers
    return 0 if are_all_sparse else padded(config.intermediate_size, GROUP)


def expert_size(config: ModelConfig) -> int:
    """Padded width of the experts; 0 where there are none."""
    return 0 if config.experts is None else padded(config.experts.intermediate_size, GROUP)


def make_workspace(config: ModelConfig, num_rows: int, *, keeps_peaks: bool = False) -> Workspace:
    """Zeros for steps of up to `num_rows` tokens, with or without a record of the largest inputs."""
    hidden, gate = padded(config.hidden_size, GROUP), gate_size(config)
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attended = padded(query_size, GROUP)
    widest = max(hidden, gate, attended)  # of the inputs of linears
    num_recorded = len(Part) * config.num_layers + 1 if keeps_peaks else 0
    return Workspace(
        states=_floats(num_rows, hidden),
        branch=_floats(num_rows, hidden),
        normed=_floats(num_rows, hidden),
        merged=_floats(num_rows, padded(query_size + 2 * kv_size, VECTOR)),
        queries=aligned_zeros((num_rows, query_size), np.uint16),
        attended=_floats(num_rows, attended),
        gated=_floats(num_rows, 2 * gate),
        **_inputs(num_rows, widest),
        peaks=np.zeros((num_recorded, max(widest, expert_size(config))), np.float32),
        num_parts=num_threads(),
    )


def make_mixture(config: ModelConfig, num_rows: int) -> Mixture:
    """Zeros for the experts of steps of up to `num_rows` tokens; next to nothing where there are none."""
    experts = config.experts
    num_experts, each = (0, 0) if experts is None else (experts.num_experts, experts.experts_per_token)
    num_visits = num_rows * each
    hidden, inner = padded(config.hidden_size, GROUP), expert_size(config)
    unused = _floats(num_visits, 0)
    visits = Workspace(
        states=unused,
        branch=_floats(num_visits, hidden),
        normed=unused,
        merged=unused,
        queries=aligned_zeros((num_visits, 0), np.uint16),
        attended=unused,
        gated=_floats(num_visits, 2 * inner),
        **_inputs(num_visits, max(hidden, inner)),
        peaks=unused,
        num_parts=num_threads(),
    )
    return Mixture(
        scores=_floats(num_rows, padded(num_experts, VECTOR)),
        chosen=np.zeros((num_rows, each), np.int64),
        shares=_floats(num_rows, each),
        places=np.zeros((num_rows, each), np.int64),
        firsts=np.zeros(num_experts + 1, np.int64),
        visits=visits,
    )


def _floats(num_rows: int, width: int) -> Array:
    return aligned_zeros((num_rows, width), np.float32)


def _inputs(num_rows: int, widest: int) -> dict[str, Array]:
    """Inputs of linears, of which bfloat16 takes most room, and what is kept apart."""
    num_bytes = widest // GROUP * BFLOAT16_INPUT_BYTES
    return {"inputs": aligned_zeros((num_rows, num_bytes), np.uint8), "outliers": _floats(num_rows, MOST_OUTLIERS)}
