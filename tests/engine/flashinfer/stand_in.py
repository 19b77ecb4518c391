"""The two FlashInfer wrappers that busllm uses, in a few lines of torch on a CPU.

It computes what the library's documentation says, reads what the kernels would read (the fixed places of a recorded
wrapper, not the arguments of a plan), and refuses what the library refuses: arguments that some supported version does
not have, index arrays on the wrong side, another number of rows in a recorded wrapper.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SIGNATURES: dict[str, dict[str, dict[str, dict[str, bool]]]] = json.loads(
    (Path(__file__).parent / "signatures.json").read_text()
)


def check_arguments(class_name: str, method: str, arguments: set[str]) -> None:
    """Every version takes these arguments and needs no other."""
    for version, classes in SIGNATURES.items():
        known = classes[class_name][method]
        unknown = arguments - set(known)
        missing = {name for name, is_needed in known.items() if is_needed} - arguments
        if unknown or missing:
            raise TypeError(f"{class_name}.{method} of {version}: unknown {unknown}, missing {missing}")


class StandInFlashInfer:
    """Stands for the package; `wrappers` are the objects that were made."""

    def __init__(self) -> None:
        self.wrappers: list[StandInWrapper] = []

    def BatchDecodeWithPagedKVCacheWrapper(self, workspace: torch.Tensor, **arguments: Any) -> StandInWrapper:  # noqa: N802
        return self._made(StandInDecode(workspace, arguments))

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: torch.Tensor, **arguments: Any) -> StandInWrapper:  # noqa: N802
        return self._made(StandInPrefill(workspace, arguments))

    def _made(self, wrapper: StandInWrapper) -> StandInWrapper:
        self.wrappers.append(wrapper)
        return wrapper


class StandInWrapper:
    """What both have in common."""

    name = ""

    def __init__(self, workspace: torch.Tensor, arguments: dict[str, Any]) -> None:
        check_arguments(self.name, "__init__", {"float_workspace_buffer", *arguments})
        assert workspace.dtype == torch.uint8
        assert not workspace.any(), "the workspace must be zeros at first"
        assert arguments["kv_layout"] == "NHD"
        self.made_with = arguments
        self.planned: dict[str, Any] = {}
        self.num_plans = 0

    def plan(self, **arguments: Any) -> None:
        check_arguments(self.name, "plan", set(arguments))
        self.planned = arguments
        self.num_plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], **arguments: Any) -> torch.Tensor:
        check_arguments(self.name, "run", {"q", "paged_kv_cache", *arguments})
        out = arguments["out"]
        assert q.shape == out.shape and q.dtype == self.planned["q_data_type"] and out.is_contiguous()
        assert q.shape[1] == self.planned["num_qo_heads"]
        queries, indptr, indices, last = self.places()
        assert len(q) == int(queries[-1]), "the queries are not those of the plan"
        for row in range(len(last)):
            own = slice(int(queries[row]), int(queries[row + 1]))
            pages = indices[int(indptr[row]) : int(indptr[row + 1])].long()
            length = (len(pages) - 1) * self.planned["page_size"] + int(last[row])
            keys, values = (states[pages].flatten(0, 1)[:length] for states in paged_kv_cache)
            out[own] = self._attend(q[own], keys, values).to(out.dtype)
        return out

    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Offsets of queries, offsets of pages, pages, lengths of last pages: where a kernel reads them."""
        raise NotImplementedError

    def _attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        plan = self.planned
        shared = plan["num_qo_heads"] // plan["num_kv_heads"]
        assert keys.shape[1:] == (plan["num_kv_heads"], plan.get("head_dim", plan.get("head_dim_qk")))
        keys, values = (states.double().repeat_interleave(shared, dim=1) for states in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * plan["sm_scale"]
        if plan["logits_soft_cap"]:
            scores = plan["logits_soft_cap"] * torch.tanh(scores / plan["logits_soft_cap"])
        position = torch.arange(len(keys) - len(queries), len(keys))[:, None]  # aligned at the end
        key = torch.arange(len(keys))[None]
        hidden = key > position
        if plan["window_left"] >= 0:
            hidden |= key < position - plan["window_left"]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(dim=-1), values)


class StandInDecode(StandInWrapper):
    """Rows with one query."""

    name = "BatchDecodeWithPagedKVCacheWrapper"

    def plan(self, **arguments: Any) -> None:
        super().plan(**arguments)
        _check_int32(arguments["indptr"], arguments["indices"], arguments["last_page_len"])
        if not self.made_with.get("use_cuda_graph"):
            return
        indptr, indices, last = self._fixed()
        if len(arguments["last_page_len"]) != len(last):
            raise ValueError("the batch size of a recorded wrapper is fixed")
        indptr.copy_(arguments["indptr"])
        last.copy_(arguments["last_page_len"])
        indices[: len(arguments["indices"])].copy_(arguments["indices"])

    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.made_with.get("use_cuda_graph"):
            indptr, indices, last = self._fixed()
        else:
            indptr, indices, last = (self.planned[name] for name in ("indptr", "indices", "last_page_len"))
        return torch.arange(len(last) + 1), indptr, indices, last

    def _fixed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        names = "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"
        indptr, indices, last = (self.made_with[name] for name in names)
        return indptr, indices, last


class StandInPrefill(StandInWrapper):
    """Rows with many queries."""

    name = "BatchPrefillWithPagedKVCacheWrapper"

    def plan(self, **arguments: Any) -> None:
        super().plan(**arguments)
        _check_int32(*self.places())
        assert arguments["causal"], "without it every query sees all keys"

    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        names = "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"
        queries, indptr, indices, last = (self.planned[name] for name in names)
        return queries, indptr, indices, last


def _check_int32(*arrays: torch.Tensor) -> None:
    assert all(array.dtype == torch.int32 and array.is_contiguous() for array in arrays)
