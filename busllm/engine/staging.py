"""Bringing a step's arrays to the device without holding up the host.

Owns: copies from the host that run behind the steps already launched.
Does not know: what is copied.
Next on the path: `engine/model_runner.py`; the way back is `engine/host_copy.py`.

A plain copy from pageable memory waits until the device has done all that was launched, so at depth 1 the host would
stand still while a step runs. So arrays go through pinned memory. The memory is torch's own cache of pinned blocks: a
block is given out again only when the copy out of it is done, so nothing here has to be kept alive or counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Starts a copy; what is launched after it on the same stream sees the values.

    Args:
        array: any shape and dtype that torch has. On CPU the tensor shares its memory.
        device: where to.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host
    return pinned(host, device).to(device, non_blocking=True)


def to_device_together(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Like `to_device`, for several flat arrays in one copy.

    Args:
        arrays: int64, one dimension each; may be empty.
        device: where to.

    Returns:
        int64, one tensor per array; parts of one, or on CPU with the memory of the arrays.
    """
    if device.type == "cpu":
        return tuple(to_device(array, device) for array in arrays)
    joined = to_device(np.concatenate(arrays), device)
    return torch.split(joined, [len(array) for array in arrays])


def pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host tensor from which the device can read by itself; on other devices than CUDA the tensor."""
    return host.pin_memory() if device.type == "cuda" else host
