"""Weights by their Hugging Face names, whatever file they come from.

Owns: `WeightTensor`, the one interface to a stored tensor, and the choice of the reader.
Does not know: the file formats (`gguf_weights.py`, `safetensors_weights.py`), torch, layers.
Next on the path: the engine's loader, which makes parameters of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any, Protocol

import numpy as np

from busllm.errors import ModelError
from busllm.model_store.files import ModelFiles
from busllm.model_store.tensor_part import WHOLE, TensorPart


class WeightTensor(Protocol):
    """One stored tensor. Nothing is read before `raw` or `to_float32`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, rows first, as PyTorch counts."""
        ...

    @property
    def quantization(self) -> str:
        """Number format: "float32", "float16", "bfloat16", a block format of ggml in lower case ("q4_1", "q8_0", …), or
        another safetensors dtype in lower case ("i64", "f8_e4m3", …)."""
        ...

    @property
    def raw(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The stored bytes, uint8 [product of all dimensions but the last, bytes of one row].

        Rows are in Hugging Face's order. A read-only view of the mapped file where the file has that order, a copy
        otherwise.
        """
        ...

    def to_float32(self, part: TensorPart = WHOLE) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The values, float32, of `shape`, or those of a part: no more of the file is decoded than holds it.

        Raises:
            ModelError: the number format cannot be decoded.
        """
        ...


def iter_tensors(files: ModelFiles) -> Iterator[tuple[str, WeightTensor]]:
    """All weights of a model, in the order of its files.

    Yields:
        (Hugging Face name such as "model.layers.0.self_attn.q_proj.weight", tensor).

    Raises:
        ModelError: a file is damaged or has a tensor that is not understood; or the null model, which has no weights.
    """
    # The readers need numpy's and ggml's tables; a process that only asks where files are does without.
    if files.gguf is not None:
        from busllm.model_store.gguf_weights import iter_gguf

        yield from iter_gguf(files.gguf)
    elif files.safetensors:
        from busllm.model_store.safetensors_weights import iter_safetensors

        yield from iter_safetensors(files.safetensors)
    else:
        raise ModelError(f"The model {files.name!r} has no weights.")


def most_common_format(files: ModelFiles) -> str | None:
    """The number format in which most of a model's weights are stored; None = there are none. Reads headers only.

    Raises:
        ModelError: a file is damaged or has a tensor that is not understood.
    """
    counts: Counter[str] = Counter()
    if files.weights:
        for _, tensor in iter_tensors(files):
            counts[tensor.quantization] += prod(tensor.shape)
    return counts.most_common(1)[0][0] if counts else None
