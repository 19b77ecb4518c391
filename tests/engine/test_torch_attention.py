"""The reference attention against the textbook formula, on ragged rows over scattered pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from busllm.engine.attention.choose import attention_factory
from busllm.engine.attention.protocol import AttentionConfig
from busllm.engine.attention.torch_attention import TorchAttention
from busllm.engine.batch import SlotPages, make_batch
from busllm.engine.kv_cache import KVShape
from busllm.errors import MissingPackage
from busllm.plan import PagesAssigned, PlanRow, StepPlan

HEADS, KV_HEADS, DIM, PAGE, PAGES = 6, 2, 16, 8, 200
ROWS = ((300, 1), (5, 1), (129, 1), (0, 20), (120, 30), (0, 1), (255, 2))  # (tokens before, tokens of the step)
NUM_DECODE_ROWS = 3


def textbook(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k / sqrt(d)) v with a causal mask; the queries are the last positions of the keys."""
    num_keys, num_queries = len(keys), len(queries)
    shared = HEADS // KV_HEADS
    keys, values = (states.repeat_interleave(shared, dim=1) for states in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys.double()) * DIM**-0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    own = torch.arange(num_keys - num_queries, num_keys)[:, None]
    where = torch.arange(num_keys)[None]
    seen = where <= own
    if window is not None:
        seen &= where > own - window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, num_queries, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys]
    return torch.einsum("hqk,khd->qhd", weights, values.double())


@pytest.mark.parametrize("window", [None, 1, 7, 128, 1000])
@pytest.mark.parametrize("garbage", [0.0, float("nan")])
def test_each_row_is_the_textbook_formula_whatever_other_pages_hold(window: int | None, garbage: float) -> None:
    assert_textbook(window, garbage)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_soft_cap_and_sinks_are_those_of_the_textbook(
    window: int | None, soft_cap: float | None, with_sinks: bool
) -> None:
    sinks = torch.linspace(-2.0, 3.0, HEADS) if with_sinks else None
    assert_textbook(window, float("nan"), soft_cap, sinks)
    if sinks is not None:
        assert torch.equal(sinks, torch.linspace(-2.0, 3.0, HEADS))  # read, not used up


def assert_textbook(
    window: int | None, garbage: float, soft_cap: float | None = None, sinks: torch.Tensor | None = None
) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = KVShape(1, KV_HEADS, DIM, PAGES, PAGE, torch.float32, torch.device("cpu"))
    layer_sinks = None if sinks is None else (sinks,)
    attention = TorchAttention(AttentionConfig(HEADS, DIM**-0.5, (window,), shape, soft_cap, layer_sinks))
    attention.cache.keys.fill_(garbage)
    attention.cache.values.fill_(garbage)
    tables = SlotPages(max_running=len(ROWS), max_context_tokens=512, num_pages=PAGES, page_tokens=PAGE)
    free = iter(torch.randperm(PAGES, generator=generator).tolist())
    rows, keys, values = [], [], []
    for slot, (before, num_tokens) in enumerate(ROWS):
        total = before + num_tokens
        tables.assign(PagesAssigned(slot, 0, tuple(next(free) for _ in range(-(-total // PAGE)))))
        rows.append(PlanRow(slot, before, num_tokens, b"\0\0\0\0" * num_tokens, None, True))
        keys.append(torch.randn(total, KV_HEADS, DIM, generator=generator))
        values.append(torch.randn(total, KV_HEADS, DIM, generator=generator))
        where = tables.cache_slots(np.full(total, slot), np.arange(total))
        attention.cache.store(0, keys[-1], values[-1], torch.from_numpy(where))
    batch = make_batch(StepPlan(0, tuple(rows), NUM_DECODE_ROWS), tables)
    queries = torch.randn(batch.num_tokens, HEADS, DIM, generator=generator)
    attention.prepare(batch)
    out = attention.attend(0, queries)
    for row in range(len(ROWS)):
        own = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
        expected = textbook(queries[own], keys[row], values[row], window, soft_cap, sinks)
        assert (out[own] - expected).abs().max() < 1e-5


def test_an_unknown_backend_is_named_with_the_ones_there_are() -> None:
    with pytest.raises(MissingPackage, match="Built in: auto, torch"):
        attention_factory("trch")
