"""Rows of a step with keys and values behind them, the same for every backend that is compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from busllm.engine.attention.protocol import Attention, AttentionConfig
from busllm.engine.batch import RaggedBatch, SlotPages, make_batch
from busllm.engine.kv_cache import KVShape
from busllm.plan import PagesAssigned, PlanRow, StepPlan

HEADS, KV_HEADS, DIM, PAGE, PAGES = 6, 2, 64, 4, 128
WINDOWS = (None, 5, None, 1)
ROWS = ((0, 1), (7, 1), (8, 1), (30, 1), (0, 3), (4, 9), (17, 2))  # (tokens before, tokens of the step)
NUM_DECODE_ROWS = 4

Rows = Sequence[tuple[int, int]]


def shape(device: str = "cpu", dtype: torch.dtype = torch.bfloat16, head_dim: int = DIM) -> KVShape:
    return KVShape(len(WINDOWS), KV_HEADS, head_dim, PAGES, PAGE, dtype, torch.device(device))


def config(soft_cap: float | None = None, kv: KVShape | None = None, **options: object) -> AttentionConfig:
    return AttentionConfig(HEADS, 0.3, WINDOWS, kv or shape(), soft_cap, **options)  # type: ignore[arg-type]


def batch_of(rows: Rows, num_decode_rows: int) -> tuple[RaggedBatch, SlotPages]:
    """The rows over scattered pages."""
    tables = SlotPages(max_running=16, max_context_tokens=128, num_pages=PAGES, page_tokens=PAGE)
    free = iter(np.random.default_rng(1).permutation(PAGES).tolist())
    plan_rows = []
    for slot, (before, num_tokens) in enumerate(rows):
        tables.assign(PagesAssigned(slot, 0, tuple(next(free) for _ in range(-(-(before + num_tokens) // PAGE)))))
        plan_rows.append(PlanRow(slot, before, num_tokens, b"\0\0\0\0" * num_tokens, None, True))
    return make_batch(StepPlan(0, tuple(plan_rows), num_decode_rows), tables), tables


def fill(tables: SlotPages, rows: Rows, *attentions: Attention) -> None:
    """The same keys and values for all positions of all rows, in every layer."""
    generator = torch.Generator().manual_seed(2)
    for slot, row in enumerate(rows):
        where = torch.from_numpy(tables.cache_slots(np.full(sum(row), slot), np.arange(sum(row))))
        for layer in range(len(WINDOWS)):
            drawn = torch.randn(2, sum(row), KV_HEADS, attentions[0].cache.shape.head_dim, generator=generator)
            for attention in attentions:
                kv = attention.cache.shape
                keys, values = drawn.to(kv.device, kv.dtype)
                attention.cache.store(layer, keys, values, where.to(kv.device))


def queries_for(num_tokens: int, kv: KVShape | None = None) -> torch.Tensor:
    kv = kv or shape()
    drawn = torch.randn(num_tokens, HEADS, kv.head_dim, generator=torch.Generator().manual_seed(3))
    return drawn.to(kv.device, kv.dtype)
