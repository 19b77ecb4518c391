"""CUDA graphs: recording what is launched on a stream.

Owns: the warm-up before a recording, and the memory that all recordings share.
Does not know: what is recorded (`engine/graphs.py`).

The recordings of a runner share one pool of memory. That is right because they are replayed one after the other on one
stream and each result is used before the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from busllm.engine.models.config import ModelConfig
from busllm.engine.models.protocol import CausalModelConfig

_WARM_UP_RUNS = 2  # libraries choose kernels, load code and make buffers in the first ones, which cannot be recorded


def recorder_for(config: CausalModelConfig, device: torch.device, *, num_ranks: int) -> CudaGraphRecorder | None:
    """A recorder, where decode steps of a model can be recorded.

    Args:
        config: of the model. A layer of experts reads on the host how many tokens each expert got, and layers of
            `transformers` do what they like; neither can be recorded.
        device: None is the answer on all but CUDA.
        num_ranks: with several, a step waits for the other ranks while it is launched.
    """
    can_be_recorded = isinstance(config, ModelConfig) and config.experts is None
    return CudaGraphRecorder(device) if device.type == "cuda" and num_ranks == 1 and can_be_recorded else None


@dataclass(frozen=True)
class CudaRecordedStep:
    """Implements `RecordedStep`."""

    graph: torch.cuda.CUDAGraph
    result: torch.Tensor

    def replay(self) -> None:
        """Launches it on the current stream."""
        self.graph.replay()


class CudaGraphRecorder:
    """Implements `GraphRecorder`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any | None = None  # an opaque handle

    def begin(self) -> None:
        """Takes a new pool: one whose recordings are all gone cannot be recorded into again."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], torch.Tensor]) -> CudaRecordedStep:
        """Warms up beside the current stream, then records."""
        with torch.cuda.device(self._device):
            current, beside = torch.cuda.current_stream(), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            beside.wait_stream(current)
            with torch.cuda.stream(beside):
                for _ in range(_WARM_UP_RUNS):
                    work()
            current.wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                result = work()
        return CudaRecordedStep(graph, result)
