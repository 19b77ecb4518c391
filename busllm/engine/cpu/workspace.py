"""Working memory of a step.

Owns: the widths of its arrays.
Does not know: when it grows (`cpu_decoder.py`).
"""

from __future__ import annotations

import numpy as np

from busllm.engine.cpu.pack import aligned_zeros
from busllm.engine.cpu.shapes import GROUP, MOST_OUTLIERS, VECTOR, Part, Workspace, padded
from busllm.engine.models.config import ModelConfig


def make_workspace(config: ModelConfig, num_rows: int, *, keeps_peaks: bool = False) -> Workspace:
    """Zeros for steps of up to `num_rows` tokens, with or without a record of the largest inputs."""
    hidden, gate = padded(config.hidden_size, GROUP), padded(config.intermediate_size, GROUP)
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attended = padded(query_size, GROUP)
    widest = max(hidden, gate, attended)  # of the inputs of linears
    groups = num_rows * widest // GROUP
    num_recorded = len(Part) * config.num_layers + 1 if keeps_peaks else 0

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
        outliers=floats(MOST_OUTLIERS),
        scales=aligned_zeros((groups,), np.float32),
        lows=aligned_zeros((groups,), np.float32),
        sums=aligned_zeros((groups,), np.float32),
        peaks=np.zeros((num_recorded, widest), np.float32),
    )
