"""The test that a hooked model passes before it serves.

Owns: two random sequences, in chunks, decoded and side by side, compared with the model's own attention on each alone.
Does not know: how a model is loaded; it drives attention as the runner does.
Next on the path: `models/hooked/load.py`, which refuses the model when it fails.

A layer that mixes tokens outside of attention, a mask of the model's own, positions that are not the given ones: each
of them may give right answers for one whole prompt, and gives wrong ones here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from busllm.engine.attention.protocol import Attention, AttentionFactory
from busllm.engine.batch import SlotPages, input_tokens, make_batch
from busllm.engine.kv_cache import KVShape
from busllm.engine.models.hooked.hooked_model import HookedModel
from busllm.engine.models.protocol import attention_config
from busllm.errors import ModelError
from busllm.plan import PagesAssigned, PlanRow, StepPlan

PAGE_TOKENS = 16
_SHORT_TOKENS, _LONG_TOKENS, _TOKENS_BEYOND_WINDOW = 11, 37, 9
# Of each token's logits: norm of the error / norm of the logits. Another attention gives about 1.
MAX_ERROR_FLOAT32 = 1e-3
MAX_ERROR_HALF, MAX_MEAN_ERROR_HALF = 0.5, 0.05  # rounding may send a token to another expert, but not most tokens


def sample_sequences(vocab_size: int, window: int | None, max_context_tokens: int) -> tuple[list[int], list[int]]:
    """Two random prompts, the first one longer than the window, if the context is."""
    length = min(max(_LONG_TOKENS, (window or 0) + _TOKENS_BEYOND_WINDOW), max_context_tokens)
    draw = np.random.default_rng(0)
    return draw.integers(0, vocab_size, length).tolist(), draw.integers(0, vocab_size, _SHORT_TOKENS).tolist()


@torch.inference_mode()
def check(
    model: HookedModel,
    sequences: tuple[Sequence[int], Sequence[int]],
    expected: Sequence[torch.Tensor],
    attention: AttentionFactory,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Compares.

    Args:
        model: with our attention.
        sequences: from `sample_sequences`.
        expected: of each sequence float32 (its tokens, vocab_size), the logits with the model's own attention.
        attention: the backend that is to serve.
        device, dtype: of the KV cache.

    Raises:
        ModelError: they differ; the message is a clause about the model.
    """
    shape = model.config.attention_shape
    tables, num_pages = _tables(sequences)
    kv = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, num_pages, PAGE_TOKENS, dtype, device)
    backend = attention(attention_config(shape, kv))
    pieces: tuple[list[torch.Tensor], ...] = ([], [])
    for plan in _plans(sequences):
        logits = _run(model, plan, tables, backend, device)
        for row, part in zip(plan.rows, torch.split(logits, [row.num_tokens for row in plan.rows]), strict=True):
            pieces[row.slot].append(part)
    errors = torch.cat(
        [_errors(torch.cat(parts), whole) for parts, whole in zip(pieces, expected, strict=True)]
    )  # (num_tokens,)
    worst, mean = errors.max().item(), errors.mean().item()
    half = dtype != torch.float32
    if not worst <= (MAX_ERROR_HALF if half else MAX_ERROR_FLOAT32) or (half and not mean <= MAX_MEAN_ERROR_HALF):
        raise ModelError(
            "two sequences side by side, in chunks and decoded, give other logits than each of them alone: "
            f"they differ by {worst:.1%} of their size (mean {mean:.1%})"
        )


def _tables(sequences: Sequence[Sequence[int]]) -> tuple[SlotPages, int]:
    """Page tables of two slots, whose pages lie between each other and in no order."""
    needed = [-(-len(sequence) // PAGE_TOKENS) for sequence in sequences]
    tables = SlotPages(
        max_running=len(sequences),
        max_context_tokens=max(len(sequence) for sequence in sequences),
        num_pages=sum(needed),
        page_tokens=PAGE_TOKENS,
    )
    pages = np.random.default_rng(1).permutation(sum(needed)).tolist()
    for slot, count in enumerate(needed):
        tables.assign(PagesAssigned(slot, 0, tuple(pages.pop() for _ in range(count))))
    return tables, sum(needed)


def _plans(sequences: tuple[Sequence[int], Sequence[int]]) -> tuple[StepPlan, ...]:
    """Chunks of both; then a decode beside a chunk; then a decode alone."""
    long, short = (len(sequence) for sequence in sequences)
    cuts = (((0, 0, long - 2), (1, 0, short // 2)), ((0, long - 2, long - 1), (1, short // 2, short)))
    rows = [tuple(_row(slot, sequences[slot], start, end) for slot, start, end in step) for step in cuts]
    last = (_row(0, sequences[0], long - 1, long),)
    return StepPlan(0, rows[0], 0), StepPlan(1, rows[1], 1), StepPlan(2, last, 1)


def _row(slot: int, sequence: Sequence[int], start: int, end: int) -> PlanRow:
    return PlanRow(slot, start, end - start, np.asarray(sequence[start:end], dtype="<i4").tobytes(), None, True)


def _run(
    model: HookedModel, plan: StepPlan, tables: SlotPages, backend: Attention, device: torch.device
) -> torch.Tensor:
    batch = make_batch(plan, tables)
    backend.prepare(batch)
    arrays = (input_tokens(plan.rows), batch.positions, batch.cache_slots)
    tokens, positions, slots = (torch.from_numpy(array).to(device) for array in arrays)
    return model.logits(model.hidden_states(tokens, positions, slots, backend))


def _errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    error: torch.Tensor = torch.linalg.vector_norm(actual - expected, dim=-1)
    size: torch.Tensor = torch.linalg.vector_norm(expected, dim=-1)
    return error / size
