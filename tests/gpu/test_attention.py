"""FlashInfer's kernels against the reference, row by row, on the device."""

from __future__ import annotations

import pytest
import torch

from busllm.engine.attention.flashinfer_attention import FlashInferAttention
from busllm.engine.attention.torch_attention import TorchAttention
from tests.engine.flashinfer.rows import NUM_DECODE_ROWS, ROWS, WINDOWS, batch_of, config, fill, queries_for, shape

pytestmark = pytest.mark.gpu

LONG_ROWS = (*ROWS[:NUM_DECODE_ROWS], (3, 90), (40, 70))  # beyond 64 queries the library may take other kernels


@pytest.mark.parametrize(("head_dim", "soft_cap"), [(64, None), (128, None), (64, 2.0)])
def test_every_layer_gives_what_the_reference_gives(head_dim: int, soft_cap: float | None) -> None:
    kv = shape("cuda", head_dim=head_dim)
    attention, reference = FlashInferAttention(config(soft_cap, kv)), TorchAttention(config(soft_cap, kv))
    for rows in (ROWS, LONG_ROWS[:NUM_DECODE_ROWS], LONG_ROWS):
        batch, tables = batch_of(rows, NUM_DECODE_ROWS)
        fill(tables, rows, attention, reference)
        queries = queries_for(batch.num_tokens, kv)
        for each in (attention, reference):
            each.prepare(batch)
        for layer in range(len(WINDOWS)):
            difference = attention.attend(layer, queries).float() - reference.attend(layer, queries).float()
            assert difference.abs().max() < 3e-2


def test_float16_too() -> None:
    kv = shape("cuda", torch.float16)
    attention, reference = FlashInferAttention(config(kv=kv)), TorchAttention(config(kv=kv))
    batch, tables = batch_of(ROWS, NUM_DECODE_ROWS)
    fill(tables, ROWS, attention, reference)
    for each in (attention, reference):
        each.prepare(batch)
    queries = queries_for(batch.num_tokens, kv)
    difference = attention.attend(0, queries).float() - reference.attend(0, queries).float()
    assert difference.abs().max() < 5e-3
