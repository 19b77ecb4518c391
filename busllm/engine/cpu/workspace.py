"""Working memory of a step.

Owns: the widths of its arrays.
Does not know: when it grows (`cpu_decoder.py`).
"""

from __future__ import annotations

import numpy as np

from busllm.engine.cpu.pack import aligned_zeros
from busllm.engine.cpu.shapes import GROUP, VECTOR, Workspace, padded
from busllm.engine.models.config import ModelConfig


def make_workspace(config: ModelConfig, num_rows: int) -> Workspace:
    """Zeros for steps of up to `num_rows` tokens."""
    hidden, gate = padded(config.hidden_size, GROUP), padded(config.intermediate_size, GROUP)
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attended = padded(query_size, GROUP)
    widest = max(hidden, gate, attended)  # of the inputs of linears
    groups = num_rows * widest // GROUP

    def floats(width: int) -> np.ndarray:
        return aligned_zeros((num_rows, width), np.float32)

    return Workspace(
        states=floats(hidden),
        branch=floats(hidden),
        normed=floats(hidden),
        merged=floats(padded(query_size + 2 * kv_size, VECTOR)),
        queries=aligned_zeros((num_rows, query_size), np.uint16),
        attended=floats(attended),
        gated=floats(2 * gate),
        inputs=aligned_zeros((num_rows, widest), np.uint16),
        scales=aligned_zeros((groups,), np.float32),
        lows=aligned_zeros((groups,), np.float32),
        sums=aligned_zeros((groups,), np.float32),
    )
