"""Prompts and runners of the tiny models."""

from __future__ import annotations

import random
from pathlib import Path

from busllm.engine.loader import LoadConfig, load_runner
from busllm.sampling import SamplingParams
from busllm.testing.plan_driver import DrivenSequence, PlanDriver

LENGTHS = (1, 2, 15, 16, 17, 33, 80, 130, 150)  # around page borders, and beyond one block of keys


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 1, vocab_size: int = 256) -> list[list[int]]:
    """Random prompts, one per length."""
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]


def driver(directory: Path, *, page_tokens: int = 16, dtype: str = "float32", attention: str = "torch") -> PlanDriver:
    """A driver of a freshly loaded model."""
    runner = load_runner(str(directory), LoadConfig(device="cpu", dtype=dtype, attention=attention))
    return PlanDriver(runner, page_tokens=page_tokens)


def greedy(max_tokens: int = 8, top: int = 3) -> SamplingParams:
    """Settings whose log probabilities show more than the chosen token."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=top)


def alone(directory: Path, all_prompts: list[list[int]], **options: object) -> list[DrivenSequence]:
    """Each prompt whole and without company."""
    one = driver(directory, **options)  # type: ignore[arg-type]
    return [one.run(DrivenSequence(prompt, greedy()))[0] for prompt in all_prompts]


def assert_same_bits(actual: object, expected: object) -> None:
    """Tokens and log probabilities of two runs are equal to the last bit."""
    assert [s.output for s in actual] == [s.output for s in expected]  # type: ignore[attr-defined]
    assert [s.logprobs for s in actual] == [s.logprobs for s in expected]  # type: ignore[attr-defined]
