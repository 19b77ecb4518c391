"""One sequence through the compiled pass, without a runner.

Owns: the smallest batch there is. A start runs one token, so that compiled code is there before the first request;
measurements run whole texts.
Does not know: sampling, other sequences.
"""

from __future__ import annotations

import numpy as np
import torch

from busllm.engine.batch import SlotPages, make_batch
from busllm.engine.cpu.cpu_attention import CpuAttention
from busllm.engine.cpu.cpu_decoder import CpuDecoder
from busllm.engine.cpu.runs import BLOCK
from busllm.engine.kv_cache import KVShape
from busllm.engine.models.protocol import attention_config
from busllm.plan import PagesAssigned, PlanRow, StepPlan


def logits_of(decoder: CpuDecoder, token_ids: list[int]) -> torch.Tensor:
    """Logits at every position of a sequence, computed in one step.

    Returns:
        float32 (num_tokens, vocab_size), overwritten by the decoder's next call.
    """
    num_tokens = len(token_ids)
    num_pages = -(-num_tokens // BLOCK)
    attention = CpuAttention(attention_config(decoder.config.attention_shape, _kv_shape(decoder, num_pages)))
    tables = SlotPages(max_running=1, max_context_tokens=num_tokens, num_pages=num_pages, page_tokens=BLOCK)
    tables.assign(PagesAssigned(0, 0, tuple(range(num_pages))))
    ids = np.asarray(token_ids, dtype="<i4")
    row = PlanRow(slot=0, start=0, num_tokens=num_tokens, token_ids=ids.tobytes(), from_step=None, samples=True)
    batch = make_batch(StepPlan(number=0, rows=(row,), num_decode_rows=0), tables)
    attention.prepare(batch)
    positions, cache_slots = torch.from_numpy(batch.positions), torch.from_numpy(batch.cache_slots)
    states = decoder.hidden_states(torch.from_numpy(ids.astype(np.int64)), positions, cache_slots, attention)
    return decoder.logits(states)


def _kv_shape(decoder: CpuDecoder, num_pages: int) -> KVShape:
    shape = decoder.config.attention_shape
    return KVShape(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_pages=num_pages,
        page_tokens=BLOCK,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
