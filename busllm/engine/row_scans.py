"""What is asked of all logits of each row: whether they are numbers, the most likely token, a draw.

Owns: these three questions, and their answers by torch and numpy, on any device.
Does not know: edits, grammars, whose row it is.
Next on the path: `draw.py`; the same as compiled code for CPUs is `compiled_scans.py`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from busllm.engine.draw import DrawSettings, draw


class RowScans(Protocol):
    """The questions; logits are float32 (num_rows, vocab_size)."""

    def make_finite(self, logits: torch.Tensor, impossible: float) -> torch.Tensor:
        """Puts numbers in the place of what is none: `impossible` for NaN and -inf, the largest for +inf.

        Returns:
            Whether a row's largest logit was a number: bool (num_rows,).
        """
        ...

    def most_likely(self, logits: torch.Tensor) -> torch.Tensor:
        """The token with the largest logit, the first of equals: int64 (num_rows,)."""
        ...

    def pick(self, logits: torch.Tensor, impossible: float) -> tuple[torch.Tensor, torch.Tensor]:
        """For rows that nobody edits: what `most_likely` gives after `make_finite`, and what that gives."""
        ...

    def draw(self, logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
        """One token per row, as `draw.py` defines it: int64 (num_rows,)."""
        ...


class TorchScans:
    """The readable reference."""

    def make_finite(self, logits: torch.Tensor, impossible: float) -> torch.Tensor:
        is_finite = logits.amax(dim=-1).isfinite()  # NaN and infinity come through
        logits.nan_to_num_(nan=impossible, neginf=impossible)
        return is_finite

    def most_likely(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)  # the first of equals

    def pick(self, logits: torch.Tensor, impossible: float) -> tuple[torch.Tensor, torch.Tensor]:
        is_finite = self.make_finite(logits, impossible)
        return self.most_likely(logits), is_finite

    def draw(self, logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
        return draw(logits, settings)
