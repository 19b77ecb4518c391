"""Bringing results from the device to the host without holding up the device.

Owns: copies that run behind the step that made them, and the mark to wait for.
Does not know: what is copied.
Next on the path: `engine/model_runner.py`.

Reading a tensor directly would wait for everything that was launched, the next step included. So a step ends with
copies to pinned memory and a mark; `wait` waits for that mark only. Elsewhere than on CUDA nothing has to be copied.
"""

from __future__ import annotations

import torch


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Starts a copy; it may be read after `StepMark.wait`."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class StepMark:
    """A point in the device's queue."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event(device) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    @property
    def is_passed(self) -> bool:
        """Whether the device has passed this point; any thread may ask."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Waits until the device has passed this point."""
        if self._event is not None:
            self._event.synchronize()
