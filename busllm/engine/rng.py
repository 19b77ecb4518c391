"""Random numbers that depend on nothing but seed and position.

Owns: one uniform number per (seed, position), so that a sampled token is the same alone and in any batch, after a
retraction and on another host.
Does not know: who draws, tensors.
Next on the path: `engine/draw.py`.

Counter-based: the SplitMix64 sequence (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014) started at the mixed seed, whose n-th number can be computed alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number per row, in [0, 1), a multiple of 2**-53.

    Args:
        seeds: (num_rows,), of each row's choice.
        positions: (num_rows,), of the token to be drawn, counted from the prompt's first token.

    Returns:
        float64 (num_rows,).
    """
    key = _mix(seeds + _GOLDEN)
    bits = _mix(key + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
