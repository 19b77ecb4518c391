"""The compiled answers to what is asked of whole rows of logits, for CPUs.

Owns: the way from tensors to compiled code, and how many threads it gets: those of the step that was just computed.
Does not know: what the code does (`compiled_draw.py`, `compiled_weights.py`).
Next on the path: `compiled_draw.py`.

`engine/cpu/kernels.py` must have said where compiled code is kept before this is imported.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from busllm.engine.compiled_draw import draw_rows, find_largest, make_space
from busllm.engine.draw import DrawSettings
from busllm.engine.row_scans import TorchScans

_TRIED = 4  # rows in which both ways, on one core and on several, are compiled


class CompiledScans:
    """Implements `RowScans`; compiled, or loaded from the cache, when it is made."""

    def __init__(self) -> None:
        logits = torch.zeros(_TRIED, 64)
        settings = [np.full(_TRIED, value) for value in (1.0, 2, 0.5, 0.1, 0.5)]
        self.make_finite(logits, 0.0)
        self.draw(logits, DrawSettings(settings[0], settings[1].astype(np.int64), *settings[2:]))

    def make_finite(self, logits: torch.Tensor, impossible: float) -> torch.Tensor:
        _, are_numbers = _find(logits)
        if are_numbers.all():
            return torch.from_numpy(are_numbers)
        return TorchScans().make_finite(logits, impossible)

    def most_likely(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(_find(logits)[0])

    def pick(self, logits: torch.Tensor, impossible: float) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, are_numbers = _find(logits)
        if are_numbers.all():
            return torch.from_numpy(token_ids), torch.from_numpy(are_numbers)
        return TorchScans().pick(logits, impossible)

    def draw(self, logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
        num_rows, vocab_size = logits.shape
        columns = (
            np.ascontiguousarray(settings.temperature, np.float64),
            np.ascontiguousarray(settings.top_k, np.int64),
            np.ascontiguousarray(settings.top_p, np.float64),
            np.ascontiguousarray(settings.min_p, np.float64),
            np.ascontiguousarray(settings.uniform, np.float64),
        )
        threads = min(num_rows, numba.get_num_threads())
        token_ids = np.empty(num_rows, np.int64)
        draw_rows(logits.contiguous().numpy(), columns, make_space(threads, vocab_size), token_ids)
        return torch.from_numpy(token_ids)


def _find(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The most likely token of each row (int64), and whether all of its logits are numbers (bool)."""
    num_rows = logits.shape[0]
    token_ids, are_numbers = np.empty(num_rows, np.int64), np.empty(num_rows, np.bool_)
    find_largest(logits.contiguous().numpy(), token_ids, are_numbers, numba.get_num_threads())
    return token_ids, are_numbers
