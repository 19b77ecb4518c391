"""What is used of FlashInfer, and what it can serve.

Owns: the import of the optional package, the part of its interface that busllm calls, and the limits of its kernels.
Does not know: batches, caches.
Next on the path: `attention/flashinfer_attention.py`.

The calls are those of flashinfer-python 0.6 and 0.7. Indices, lengths and offsets may be given as host tensors: the
library then plans without asking the device anything.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from busllm.errors import MissingPackage

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


class PagedWrapper(Protocol):
    """A kernel with a plan: `plan` once per step, `run` once per layer."""

    def plan(self, **arguments: Any) -> None:
        """Takes the rows of a step."""
        ...

    def run(
        self, queries: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        """Attends in one layer.

        Args:
            queries: (num_tokens, num_heads, head_dim).
            paged_kv_cache: keys and values of the layer, each (num_pages, page_tokens, num_kv_heads, head_dim).
            out: where the result is written, like `queries`.
        """
        ...


class FlashInferLibrary(Protocol):
    """The two classes of the package `flashinfer` that busllm makes objects of."""

    def BatchDecodeWithPagedKVCacheWrapper(self, workspace: torch.Tensor, **arguments: Any) -> PagedWrapper:  # noqa: N802
        """Rows with one query each."""
        ...

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: torch.Tensor, **arguments: Any) -> PagedWrapper:  # noqa: N802
        """Rows with many queries."""
        ...


def load_flashinfer() -> FlashInferLibrary:
    """Imports the package.

    Raises:
        MissingPackage: it, or something that it needs, is not installed.
    """
    try:
        import flashinfer
    except ImportError as error:
        raise MissingPackage(
            f"the attention backend 'flashinfer' cannot be loaded: {error}. "
            'Install the extra busllm[cuda], or set scheduler.attention to "torch".'
        ) from error
    library: FlashInferLibrary = flashinfer
    return library


def limit_of_kernels(head_dim: int, dtype: torch.dtype, *, has_sinks: bool) -> str | None:
    """Why the kernels cannot compute a model's attention; None when they can.

    Args:
        head_dim, has_sinks: of the model.
        dtype: of its keys and values.
    """
    if dtype not in DTYPES:
        return f"it computes in bfloat16 and float16, and the dtype is {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"its heads have {', '.join(map(str, HEAD_DIMS))} numbers, and the model's have {head_dim}"
    if has_sinks:
        return "its paged kernels leave attention sinks out, and the model has them"
    return None
