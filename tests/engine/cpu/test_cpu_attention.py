"""The compiled attention: the numbers of the reference backend, and a query's bits in every company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from busllm.engine.attention.protocol import Attention, AttentionConfig
from busllm.engine.attention.torch_attention import TorchAttention
from busllm.engine.batch import RaggedBatch, SlotPages, make_batch
from busllm.engine.cpu.kernels import prepare_kernels
from busllm.engine.kv_cache import KVShape
from busllm.errors import ConfigError, EngineError, ModelError
from busllm.plan import PagesAssigned, PlanRow, StepPlan

prepare_kernels()

from busllm.engine.cpu.cpu_attention import CpuAttention, cut_pieces  # noqa: E402

NUM_PAGES = 64
PAGES = {0: (5, 9, 2, 7, 1, 3, 8, 20, 21, 22, 23, 24), 1: (11, 10, 12), 2: (30, 31, 32, 33, 34, 35, 36, 37)}


def config(
    num_heads: int = 6, num_kv_heads: int = 2, head_dim: int = 16, window: int | None = None, page_tokens: int = 16
) -> AttentionConfig:
    kv = KVShape(
        num_layers=2,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_pages=NUM_PAGES,
        page_tokens=page_tokens,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return AttentionConfig(num_heads, head_dim**-0.5, (None, window), kv)


def batch_of(*rows: tuple[int, int, int], num_decode_rows: int = 0, page_tokens: int = 16) -> RaggedBatch:
    """Rows of (slot, start, tokens)."""
    tables = SlotPages(max_running=3, max_context_tokens=1024, num_pages=NUM_PAGES, page_tokens=page_tokens)
    for slot, pages in PAGES.items():
        tables.assign(PagesAssigned(slot, 0, pages))
    plan_rows = tuple(PlanRow(slot, start, count, bytes(4 * count), None, True) for slot, start, count in rows)
    return make_batch(StepPlan(0, plan_rows, num_decode_rows), tables)


def bfloat16(*shape: int) -> torch.Tensor:
    """Random numbers that bfloat16 has, so that both caches store the same."""
    return torch.randn(*shape).bfloat16().float()


class Pair:
    """A backend and the reference, with the same random keys and values at every place."""

    def __init__(self, settings: AttentionConfig, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.config = settings
        self.tested, self.reference = CpuAttention(settings), TorchAttention(settings)
        kv = settings.kv
        places = torch.arange(NUM_PAGES * kv.page_tokens)
        shape = (len(places), kv.num_kv_heads, kv.head_dim)
        for layer in range(2):
            keys, values = bfloat16(*shape), bfloat16(*shape)
            for backend in (self.tested, self.reference):
                backend.cache.store(layer, keys, values, places)

    def queries(self, num_tokens: int) -> torch.Tensor:
        return bfloat16(num_tokens, self.config.num_heads, self.config.kv.head_dim)


def attended(backend: Attention, batch: RaggedBatch, queries: torch.Tensor, layer: int = 1) -> torch.Tensor:
    backend.prepare(batch)
    return backend.attend(layer, queries)


MIXED = ((1, 36, 1), (0, 170, 1), (2, 0, 90), (0, 40, 37))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(6, 2, 16), (9, 3, 64), (4, 4, 20), (32, 1, 48), (8, 2, 128), (30, 1, 80)]
)
@pytest.mark.parametrize("window", [None, 1, 20, 100])
def test_a_mixed_step_is_that_of_the_reference(heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    pair = Pair(config(heads, kv_heads, head_dim, window))
    batch = batch_of(*MIXED, num_decode_rows=2)
    queries = pair.queries(batch.num_tokens)
    difference = attended(pair.tested, batch, queries) - attended(pair.reference, batch, queries)
    assert difference.abs().max() < 0.03  # queries and weights are rounded to bfloat16


@pytest.mark.parametrize("page_tokens", [16, 32, 48])
def test_pages_of_several_blocks_are_read_in_order(page_tokens: int) -> None:
    pair = Pair(config(page_tokens=page_tokens))
    batch = batch_of((0, 100, 1), (1, 0, 45), num_decode_rows=1, page_tokens=page_tokens)
    queries = pair.queries(batch.num_tokens)
    difference = attended(pair.tested, batch, queries) - attended(pair.reference, batch, queries)
    assert difference.abs().max() < 0.03


def test_gathered_pages_hold_what_was_stored() -> None:
    pair = Pair(config(head_dim=20))
    pages = torch.tensor([[5, 9, 2], [11, 63, 0]])
    for mine, theirs in zip(pair.tested.cache.gather(1, pages), pair.reference.cache.gather(1, pages), strict=True):
        assert torch.equal(mine.float(), theirs)


@pytest.mark.parametrize("window", [None, 20])
def test_a_query_has_the_same_bits_in_a_chunk_of_any_size_and_in_a_decode_step(window: int | None) -> None:
    pair = Pair(config(9, 3, 64, window))
    queries = pair.queries(150)
    whole = attended(pair.tested, batch_of((0, 0, 150)), queries)
    for chunk in (1, 7, 33, 64):
        for start in range(0, 150, chunk):
            count = min(chunk, 150 - start)
            part = attended(pair.tested, batch_of((0, start, count)), queries[start : start + count])
            assert torch.equal(part, whole[start : start + count])


def test_a_query_has_the_same_bits_alone_and_in_company() -> None:
    pair = Pair(config())
    batch = batch_of(*MIXED, num_decode_rows=2)
    queries = pair.queries(batch.num_tokens)
    together = attended(pair.tested, batch, queries)
    for row, (slot, start, count) in enumerate(MIXED):
        first = int(batch.cu_seqlens[row])
        own = queries[first : first + count]
        alone = attended(pair.tested, batch_of((slot, start, count)), own)
        assert torch.equal(alone, together[first : first + count])


def test_what_lies_beyond_a_row_has_no_influence_not_even_a_nan() -> None:
    pair = Pair(config())
    batch = batch_of((1, 0, 20))
    queries = pair.queries(20)
    before = attended(pair.tested, batch, queries)
    others = torch.tensor([p for p in range(NUM_PAGES * 16) if p // 16 != 11 and not 160 <= p < 164])
    wild = torch.full((len(others), 2, 16), torch.nan)
    wild[::2] = 3e38
    pair.tested.cache.store(1, wild, wild, others)
    assert torch.equal(attended(pair.tested, batch, queries), before)


def test_pieces_cover_every_query_head_of_every_token_once() -> None:
    heads = CpuAttention(config(32, 1, 16)).heads
    batch = batch_of(*MIXED, num_decode_rows=2)
    seen = np.zeros((batch.num_tokens, 32), dtype=int)
    for row, kv_head, first_head, num_heads, first_token, num_tokens in cut_pieces(batch, heads):
        assert kv_head == 0
        assert batch.cu_seqlens[row] <= first_token < batch.cu_seqlens[row + 1]
        seen[first_token : first_token + num_tokens, first_head : first_head + num_heads] += 1
    assert (seen == 1).all()


def test_pages_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 16"):
        CpuAttention(config(page_tokens=24))


def test_a_soft_cap_is_refused() -> None:
    capped = config()
    with pytest.raises(ModelError, match="soft cap"):
        CpuAttention(AttentionConfig(capped.num_heads, capped.scale, capped.layer_windows, capped.kv, soft_cap=30.0))


def test_attention_before_a_step_was_prepared_is_an_error() -> None:
    with pytest.raises(EngineError, match="before a step"):
        CpuAttention(config()).attend(0, torch.zeros(1, 6, 16))
