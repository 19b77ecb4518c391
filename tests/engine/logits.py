"""The logits of a runner's sampling rows, which its results do not carry."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from busllm.engine.attention.protocol import Attention
from busllm.engine.loader import LoadConfig, load_runner
from busllm.engine.model_runner import ModelRunner
from busllm.engine.models.protocol import CausalModel, CausalModelConfig
from busllm.engine.row_scans import RowScans
from busllm.engine.runner import ModelInfo
from busllm.plan import StepPlan, StepResult
from busllm.testing.plan_driver import DrivenSequence, PlanDriver
from tests.engine.reference import assert_matches

Prompt = tuple[int, ...]


class KeptLogits:
    """A decoder around another one, which keeps what it gave last."""

    def __init__(self, decoder: CausalModel) -> None:
        self._decoder = decoder
        self.last = torch.empty(0)

    @property
    def config(self) -> CausalModelConfig:
        return self._decoder.config

    @property
    def is_recordable(self) -> bool:
        return self._decoder.is_recordable

    @property
    def row_scans(self) -> RowScans:
        return self._decoder.row_scans

    def hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache_slots: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        return self._decoder.hidden_states(token_ids, positions, cache_slots, attention)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        logits = self._decoder.logits(states)
        self.last = logits.clone()  # the sampler may write into them
        return logits


class LogitsRunner:
    """A runner around another one, which keeps the logits of each sequence's sampling rows.

    Attributes:
        by_prompt: float32 (vocab_size,) per generated token.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._kept = runner._decoder = KeptLogits(runner._decoder)  # before it is allocated
        self._prompts: dict[int, Prompt] = {}
        self.by_prompt: defaultdict[Prompt, list[torch.Tensor]] = defaultdict(list)

    @property
    def model(self) -> ModelInfo:
        return self._runner.model

    @property
    def depth(self) -> int:
        return self._runner.depth

    def allocate(self, *, num_pages: int, page_tokens: int, max_running: int, max_context_tokens: int) -> None:
        self._runner.allocate(
            num_pages=num_pages,
            page_tokens=page_tokens,
            max_running=max_running,
            max_context_tokens=max_context_tokens,
        )

    def prefault_memory(self) -> bool:
        return self._runner.prefault_memory()

    def launch(self, plan: StepPlan) -> int:
        for opened in plan.opened:
            self._prompts[opened.slot] = tuple(np.frombuffer(opened.token_ids, dtype="<i4").tolist())
        handle = self._runner.launch(plan)
        sampling = [row for row in plan.rows if row.samples]
        if sampling:
            for row, logits in zip(sampling, self._kept.last, strict=True):
                self.by_prompt[self._prompts[row.slot]].append(logits)
        return handle

    def collect(self, handle: int) -> StepResult:
        return self._runner.collect(handle)

    def close(self) -> None:
        self._runner.close()


def assert_logits_match(
    directory: Path, model: PreTrainedModel, *sequences: DrivenSequence, tolerance: float = 1e-4
) -> None:
    """Served together in float32: the tokens, their log probabilities and all logits are those of `transformers`."""
    runner = LogitsRunner(load_runner(str(directory), LoadConfig(device="cpu", dtype="float32", attention="torch")))
    for sequence in PlanDriver(runner).run(*sequences):
        assert_matches(model, sequence, tolerance)
        with torch.inference_mode():
            expected = model(torch.tensor([[*sequence.prompt, *sequence.output]])).logits[0].float()
        actual = torch.stack(runner.by_prompt[tuple(sequence.prompt)])  # (num_generated, vocab_size)
        assert actual.shape == (sequence.length, expected.shape[-1])
        assert (actual - expected[len(sequence.prompt) - 1 : -1]).abs().max() < tolerance
