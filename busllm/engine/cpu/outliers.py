"""Inputs of a linear that are much larger than their neighbours, and are kept apart from the bytes.

Owns: finding them, once, when a model is packed.
Does not know: how they are multiplied (`tiles.py`), files.
Next on the path: `load.py` keeps them with the packed weights.

In a language model a few channels are up to a hundred times larger than the others, at every token. One of them in a
group of 32 sets the step to which the 31 others are rounded, so it is multiplied in float32 (mixed-precision
decomposition of arXiv:2208.07339). They are the same ones for any text, so random tokens show them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from busllm.engine.cpu.cpu_decoder import CpuDecoder
from busllm.engine.cpu.one_sequence import logits_of
from busllm.engine.cpu.packed_model import EMBEDDING, HEAD, PackedModel, matrix_name
from busllm.engine.cpu.shapes import GROUP, MOST_OUTLIERS, Format, Part
from busllm.engine.models.config import ModelConfig

_NUM_TOKENS = 256


def with_outliers(config: ModelConfig, packed: PackedModel) -> PackedModel:
    """The same model with `<matrix>.outliers`, int64 (MOST_OUTLIERS,), for each linear with bytes as states."""
    head = HEAD if HEAD in packed.formats else EMBEDDING
    linears = [matrix_name(layer, part) for layer in range(config.num_layers) for part in Part]
    quantised = [
        (index, name) for index, name in enumerate([*linears, head]) if packed.formats[name] is not Format.BFLOAT16
    ]
    if not quantised:
        return packed
    decoder = CpuDecoder(config, packed, keeps_peaks=True)
    num_tokens = min(_NUM_TOKENS, config.max_context_tokens)
    logits_of(decoder, np.random.default_rng(0).integers(0, config.vocab_size, num_tokens).tolist())
    outliers = {
        f"{name}.outliers": largest(decoder.peaks[index, : packed.arrays[f"{name}.weights"].shape[1] * GROUP])
        for index, name in quantised
    }
    return replace(packed, arrays={**packed.arrays, **outliers})


def largest(peaks: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Which inputs have the largest peaks, rising; the first ones of equals."""
    return np.sort(np.argsort(-peaks, kind="stable")[:MOST_OUTLIERS])
