"""FlashInfer's wrappers for one kind of row: planned once per step, run once per layer.

Owns: the words in which a plan is told to the library, and when the host may make the next one.
Does not know: caches, which rows are of which kind.
Next on the path: back to `attention/flashinfer_attention.py`.

A plan is made on the host, in pinned memory that belongs to its wrapper, and copied to the device behind the steps
before. So the next plan waits until that copy is done, which at depth 1 is the case when the step before is collected.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from busllm.engine.attention.flashinfer_library import PagedWrapper
from busllm.engine.attention.paged_rows import PagedRows
from busllm.engine.attention.protocol import AttentionConfig
from busllm.engine.batch import Int32s
from busllm.engine.host_copy import StepMark
from busllm.engine.staging import pinned, to_device

NO_WINDOW = -1  # the library's word for "all positions"


class PagedKernel:
    """One wrapper per window of the model, planned together."""

    def __init__(
        self, config: AttentionConfig, wrappers: Mapping[int | None, PagedWrapper], *, is_prefill: bool = False
    ) -> None:
        self._config = config
        self._wrappers = wrappers
        self._is_prefill = is_prefill
        self._planned: StepMark | None = None

    def plan(self, rows: PagedRows) -> None:
        """Takes a step's rows, for all layers."""
        if self._planned is not None:
            self._planned.wait()
        config, device = self._config, self._config.kv.device
        # The library reads the small arrays on the host. The pages it only hands on, and from the host it would copy
        # them to a fixed place while the host waits.
        qo_indptr, indptr, last_page_len = (
            _on_host(array, device) for array in (rows.qo_indptr, rows.indptr, rows.last_page_len)
        )
        indices = to_device(rows.indices, device)
        shared = {
            "num_qo_heads": config.num_heads,
            "num_kv_heads": config.kv.num_kv_heads,
            "page_size": config.kv.page_tokens,
            "logits_soft_cap": config.soft_cap,
            "sm_scale": config.scale,
            "q_data_type": config.kv.dtype,
            "kv_data_type": config.kv.dtype,
        }
        for window, wrapper in self._wrappers.items():
            window_left = NO_WINDOW if window is None else window - 1  # the library leaves the own position out
            if self._is_prefill:
                wrapper.plan(
                    qo_indptr=qo_indptr,
                    paged_kv_indptr=indptr,
                    paged_kv_indices=indices,
                    paged_kv_last_page_len=last_page_len,
                    head_dim_qk=config.kv.head_dim,
                    causal=True,
                    window_left=window_left,
                    **shared,
                )
            else:
                wrapper.plan(
                    indptr=indptr,
                    indices=indices,
                    last_page_len=last_page_len,
                    head_dim=config.kv.head_dim,
                    window_left=window_left,
                    **shared,
                )
        self._planned = StepMark(device)

    def run(
        self, layer: int, queries: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> None:
        """Attends in one layer."""
        self._wrappers[self._config.layer_windows[layer]].run(queries, pages, out=out)


def _on_host(array: Int32s, device: torch.device) -> torch.Tensor:
    return pinned(torch.from_numpy(array), device)
