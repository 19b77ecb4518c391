"""The whole forward pass on the device: reference = FlashInfer = recorded, and the host never waits while launching."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from busllm.engine.attention.choose import attention_factory
from busllm.engine.config import EngineConfig
from busllm.engine.cuda_graph import CudaGraphRecorder
from busllm.engine.engine import Engine
from busllm.engine.memory_profile import kv_bytes_of_share, largest_step
from busllm.engine.model_runner import ModelRunner
from busllm.plan import StepPlan, StepResult
from busllm.sampling import SamplingParams
from busllm.testing.engine_driver import sequence_request
from busllm.testing.plan_driver import DrivenSequence, PlanDriver
from busllm.testing.random_runner import SMALL_LLAMA, SMALL_MISTRAL, SMALL_QWEN3, random_runner
from tests.engine.tiny import greedy, prompts

pytestmark = pytest.mark.gpu

PROMPTS = prompts((1, 2, 15, 16, 17, 33, 80, 130, 150), vocab_size=512)
SHAPES = {"llama": SMALL_LLAMA, "qwen3": SMALL_QWEN3, "mistral with a window": SMALL_MISTRAL}
SAMPLED = (
    SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, max_tokens=6),
    SamplingParams(temperature=0.8, max_tokens=6, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.8, max_tokens=6, repetition_penalty=1.2, min_tokens=3, logit_bias=((3, 1.0),)),
)


def runner(shape: Any, attention: str, device: torch.device, *, recorded: bool = False) -> ModelRunner:
    recorder = CudaGraphRecorder(device) if recorded else None
    return random_runner(shape, attention_factory(attention), device=device, dtype=torch.bfloat16, recorder=recorder)


def drive(one: ModelRunner) -> list[DrivenSequence]:
    sequences = [
        DrivenSequence(prompt, greedy(16), chunk_tokens=70, start_step=index, by_reference=True)
        for index, prompt in enumerate(PROMPTS)
    ]
    return list(PlanDriver(one, num_pages=256, max_running=16).run(*sequences))


def assert_same_up_to_ties(actual: list[DrivenSequence], expected: list[DrivenSequence], tolerance: float) -> None:
    """Log probabilities are close; where two tokens are about equally likely the texts may part, and end to count."""
    num_compared = 0
    for one, other in zip(actual, expected, strict=True):
        for token, wanted, a, b in zip(one.output, other.output, one.logprobs, other.logprobs, strict=True):
            likely = dict(b.top)
            assert token in likely and abs(likely[token] - a.chosen) < tolerance
            num_compared += 1
            if token != wanted:
                assert b.chosen - likely[token] < 2 * tolerance
                break
    assert num_compared > len(expected) * 4


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_flashinfer_and_recorded_steps_follow_the_reference(shape: Any, device: torch.device) -> None:
    reference = drive(runner(shape, "torch", device))
    launched = drive(runner(shape, "flashinfer", device))
    recorded = drive(runner(shape, "flashinfer", device, recorded=True))
    assert_same_up_to_ties(launched, reference, 0.3)
    assert_same_up_to_ties(recorded, launched, 0.3)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Torch then refuses what makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class NeverWaiting:
    """A runner whose `launch` must not wait."""

    def __init__(self, inner: ModelRunner) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, plan: StepPlan) -> int:
        with waiting_is_an_error():
            return self._inner.launch(plan)

    def collect(self, handle: int) -> StepResult:
        return self._inner.collect(handle)


@pytest.mark.parametrize(
    "params",
    SAMPLED,
    ids=["greedy", "temperature", "filters", "edits"],
)
def test_launching_never_waits_for_the_device(params: SamplingParams, device: torch.device) -> None:
    one = runner(SMALL_LLAMA, "flashinfer", device, recorded=True)
    driver = PlanDriver(one, num_pages=256, max_running=16)
    driver.run(*(DrivenSequence(prompt, params) for prompt in PROMPTS[:4]))  # first uses may load and compile
    driver._runner = NeverWaiting(one)  # type: ignore[assignment]
    driver.run(*(DrivenSequence(prompt, params, by_reference=True) for prompt in PROMPTS[:4]))


def test_the_engine_keeps_two_steps_in_flight_and_gives_all_pages_back(device: torch.device) -> None:
    one = runner(SMALL_QWEN3, "flashinfer", device, recorded=True)
    engine = Engine(one, EngineConfig(num_pages=64, step_tokens=64, max_running=8, max_context_tokens=512))
    for index, prompt in enumerate(PROMPTS * 2):
        engine.submit(sequence_request(f"u{index}", prompt, SAMPLED[index % len(SAMPLED)], seed=index))
    counts = [0] * len(PROMPTS * 2)
    while engine.has_work:
        for tokens in engine.step().tokens:
            counts[int(tokens.uid[1:])] += len(tokens.token_ids)
    assert counts == [6] * len(counts)
    engine.check_integrity()
    assert engine.statistics().pages_owned == 0


@pytest.mark.parametrize("share", [0.8, 1.0])
def test_a_cache_of_the_measured_size_leaves_room_for_the_largest_step(share: float, device: torch.device) -> None:
    one = runner(SMALL_LLAMA, "flashinfer", device, recorded=True)
    config = EngineConfig(num_pages=1, step_tokens=512, max_running=32, max_context_tokens=1024)
    free_bytes, _ = torch.cuda.mem_get_info()
    kv_bytes = kv_bytes_of_share(one, share, config)
    assert free_bytes * 0.5 < kv_bytes < free_bytes
    one.allocate(
        num_pages=kv_bytes // (one.model.kv_bytes_per_token * config.page_tokens),
        page_tokens=config.page_tokens,
        max_running=config.max_running,
        max_context_tokens=config.max_context_tokens,
    )
    assert len(one.collect(one.launch(largest_step(config))).rows) == 32
    one.close()
