"""Counts for penalties: kept token by token, they are those of the whole history, and cost what differs in it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from busllm.engine.sampler import sample
from busllm.engine.seen_tokens import SeenTokens
from busllm.engine.slot_states import SlotShape, SlotStates
from busllm.errors import EngineError
from busllm.plan import SlotOpened
from busllm.sampling import SamplingParams

CPU = torch.device("cpu")
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.1, presence_penalty=0.2)


def counts_of(seen: SeenTokens, slots: list[int], positions: list[int]) -> list[dict[int, float]]:
    token_ids, counts = seen.of(np.array(slots), np.array(positions))
    return [dict(zip(*row, strict=True)) for row in zip(token_ids.tolist(), counts.tolist(), strict=True)]


def test_counts_that_were_kept_are_those_of_the_whole_history() -> None:
    source = np.random.default_rng(1)
    seen = SeenTokens(3, 64, 20, CPU)
    histories = [source.integers(0, 20, size).tolist() for size in (1, 9, 30)]
    prompts = (1, 4, 30)
    for slot, history in enumerate(histories):
        seen.open(slot, np.array(history), prompts[slot])
    for _ in range(30):
        expected = [
            {token_id: Counter(history[prompt:])[token_id] for token_id in history}
            for history, prompt in zip(histories, prompts, strict=True)
        ]
        assert counts_of(seen, [0, 1, 2], [len(history) for history in histories]) == expected
        slots = source.permutation(3)[: source.integers(1, 4)]
        new = source.integers(0, 20, len(slots))
        seen.append(slots, torch.from_numpy(new))
        for slot, token_id in zip(slots.tolist(), new.tolist(), strict=True):
            histories[slot].append(token_id)


def test_a_slot_that_is_used_again_counts_anew() -> None:
    seen = SeenTokens(1, 16, 20, CPU)
    seen.open(0, np.array([7, 8]), 1)
    assert counts_of(seen, [0], [2]) == [{7: 0, 8: 1}]
    seen.close(0)
    seen.append(np.array([0]), torch.tensor([8]))  # of one who has no penalty
    seen.close(0)
    seen.open(0, np.array([9]), 1)
    assert counts_of(seen, [0], [1]) == [{9: 0}]


def test_counts_of_other_tokens_than_there_are_is_an_error() -> None:
    seen = SeenTokens(1, 16, 20, CPU)
    seen.open(0, np.array([7, 8]), 1)
    with pytest.raises(EngineError, match="slot 0 has 3 tokens, but 2 were counted"):
        seen.of(np.array([0]), np.array([3]))


class Work(TorchDispatchMode):
    """Sums the elements that all operations give."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.num_elements += out.numel()
        return out


def work_of_a_step(num_tokens: int, params: SamplingParams) -> int:
    """Elements that the second step of a sequence of 40 different tokens handles."""
    states = SlotStates(SlotShape(1, 9_000, 500, (), CPU))
    known = (np.arange(num_tokens) % 40).astype("<i4").tobytes()
    states.open(SlotOpened(0, params, 0, known, num_tokens // 2))
    slots, logits = np.array([0]), torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    for step in range(2):
        with Work() as work:
            sampled = sample(logits.clone(), slots, np.array([num_tokens + step]), states)
            states.append(slots, np.array([num_tokens + step]), sampled.token_ids)
    return work.num_elements


@pytest.mark.parametrize("params", [PENALISED, SamplingParams(temperature=0.0, logprobs=2)])
def test_a_step_costs_the_same_however_long_the_sequence_is(params: SamplingParams) -> None:
    assert work_of_a_step(8_000, params) == work_of_a_step(80, params)


def test_tokens_that_were_counted_one_by_one_and_at_once_choose_alike_to_the_bit() -> None:
    source = torch.Generator().manual_seed(5)
    rows, slots = torch.randn(40, 1, 50, generator=source), np.array([0])
    prompt, output, kept = [3, 4, 3], [], SlotStates(SlotShape(1, 64, 50, (), CPU))
    kept.open(SlotOpened(0, PENALISED, 0, np.array(prompt, dtype="<i4").tobytes(), 3))
    for logits in rows:
        anew = SlotStates(SlotShape(1, 64, 50, (), CPU))
        anew.open(SlotOpened(0, PENALISED, 0, np.array(prompt + output, dtype="<i4").tobytes(), 3))
        positions = np.array([3 + len(output)])
        edited = [logits.clone(), logits.clone()]
        chosen = [sample(row, slots, positions, states) for row, states in zip(edited, (kept, anew), strict=True)]
        assert torch.equal(*edited)
        kept.append(slots, positions, chosen[0].token_ids)
        output.append(int(chosen[1].token_ids))
    assert len(set(output)) < len(output)
