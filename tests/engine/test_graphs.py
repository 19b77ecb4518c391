"""Recorded decode steps: the same tokens as launched ones, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from busllm.engine.attention.flashinfer_attention import FlashInferAttention
from busllm.engine.attention.torch_attention import TorchAttention
from busllm.engine.graphs import recorded_sizes
from busllm.engine.model_runner import ModelRunner
from busllm.testing.plan_driver import DrivenSequence, PlanDriver
from busllm.testing.random_runner import SMALL_LLAMA, SMALL_MISTRAL, random_runner
from tests.engine.flashinfer.stand_in import StandInFlashInfer
from tests.engine.tiny import greedy, prompts

PROMPTS = prompts((1, 2, 15, 17, 40, 33), vocab_size=512)
TINY = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2}


class ReplayedWork:
    """A recording that runs the work again, into the place of its first result."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self._work = work
        self.result = work()
        self.num_replays = 0

    def replay(self) -> None:
        self.result.copy_(self._work())
        self.num_replays += 1


class ReplayingRecorder:
    """Keeps what was recorded, in order."""

    def __init__(self) -> None:
        self.recorded: list[ReplayedWork] = []
        self.begun_after: list[int] = []

    def begin(self) -> None:
        self.begun_after.append(len(self.recorded))

    def record(self, work: Callable[[], torch.Tensor]) -> ReplayedWork:
        self.recorded.append(ReplayedWork(work))
        return self.recorded[-1]


def runner(
    raw: dict[str, object] | None = None, recorder: ReplayingRecorder | None = None, *, by_torch: bool = False
) -> ModelRunner:
    flashinfer = partial(FlashInferAttention, library=StandInFlashInfer(), workspace_bytes=64)
    return random_runner(
        {**SMALL_LLAMA, **TINY, **(raw or {})},
        TorchAttention if by_torch else flashinfer,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        recorder=recorder,
    )


def drive(one: ModelRunner, max_tokens: int = 6, max_running: int = 8) -> list[DrivenSequence]:
    """Sequences that begin and end at different steps, so that the number of decode rows goes up and down."""
    sequences = [
        DrivenSequence(prompt, greedy(max_tokens + index % 3), chunk_tokens=16, start_step=index, by_reference=True)
        for index, prompt in enumerate(PROMPTS)
    ]
    return list(PlanDriver(one, num_pages=64, max_running=max_running, max_context_tokens=64).run(*sequences))


@pytest.mark.parametrize(
    ("max_running", "sizes"),
    [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (16, (1, 2, 4, 8, 16)), (33, (1, 2, 4, 8, 16, 20, 24, 28, 32, 33))],
)
def test_sizes_double_and_then_rise_by_a_quarter(max_running: int, sizes: tuple[int, ...]) -> None:
    assert recorded_sizes(max_running) == sizes


def test_recordings_that_are_made_again_share_no_memory_with_those_that_are_gone() -> None:
    recorder = ReplayingRecorder()
    one = runner(recorder=recorder)
    for each in (one, one, one.unallocated_twin()):
        each.allocate(num_pages=8, page_tokens=4, max_running=2, max_context_tokens=16)
    assert recorder.begun_after == [0, 2, 4]


@pytest.mark.parametrize("max_running", [64, 100, 256, 1000])
def test_no_step_is_filled_up_by_more_than_a_fifth_of_it_once_it_has_16_rows(max_running: int) -> None:
    sizes = recorded_sizes(max_running)
    assert list(sizes) == sorted(set(sizes))
    for num_rows in range(1, max_running + 1):
        size = next(size for size in sizes if size >= num_rows)
        assert size < 2 * num_rows if num_rows < 16 else size <= num_rows * 1.25
    assert len(sizes) < 32


@pytest.mark.parametrize("raw", [{}, {**SMALL_MISTRAL, **TINY}], ids=["llama", "with a window"])
def test_recorded_steps_give_the_tokens_of_launched_ones(raw: dict[str, object]) -> None:
    recorder = ReplayingRecorder()
    recorded, launched = drive(runner(raw, recorder)), drive(runner(raw))
    assert [s.output for s in recorded] == [s.output for s in launched]
    for one, other in zip(recorded, launched, strict=True):
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.chosen == pytest.approx(b.chosen, abs=0.02)
    assert sum(work.num_replays for work in recorder.recorded) > 6


def test_launched_steps_give_the_tokens_of_the_reference() -> None:
    by_flashinfer, by_torch = drive(runner()), drive(runner(by_torch=True))
    for one, other in zip(by_flashinfer, by_torch, strict=True):
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.chosen == pytest.approx(b.chosen, abs=0.1)
            if a.top[0][0] != b.top[0][0]:
                break  # a tie in bfloat16: from here on they write different texts


def test_every_size_is_recorded_once_the_largest_first() -> None:
    recorder = ReplayingRecorder()
    runner(recorder=recorder).allocate(num_pages=16, page_tokens=16, max_running=8, max_context_tokens=64)
    assert [len(work.result) for work in recorder.recorded] == [8, 4, 2, 1]


def test_a_step_takes_the_next_larger_recording() -> None:
    recorder = ReplayingRecorder()
    one = PlanDriver(runner(recorder=recorder), num_pages=64, max_running=8, max_context_tokens=64)
    one.run(*(DrivenSequence(prompt, greedy(3)) for prompt in PROMPTS[:3]))
    by_size = {len(work.result): work.num_replays for work in recorder.recorded}
    assert by_size == {8: 0, 4: 2, 2: 0, 1: 0}


def test_rows_that_fill_a_step_up_touch_no_page_of_the_pool() -> None:
    recorder = ReplayingRecorder()
    backends: list[FlashInferAttention] = []

    def make(config):  # type: ignore[no-untyped-def]
        backends.append(FlashInferAttention(config, StandInFlashInfer(), workspace_bytes=64))
        return backends[-1]

    one = random_runner(
        {**SMALL_LLAMA, **TINY}, make, device=torch.device("cpu"), dtype=torch.bfloat16, recorder=recorder
    )
    driver = PlanDriver(one, num_pages=64, max_running=8, max_context_tokens=64)
    sequences = driver.run(*(DrivenSequence(prompt, greedy(3)) for prompt in PROMPTS[:3]))
    used = {page for sequence in sequences for page in sequence.pages}
    (backend,) = backends
    written = backend.cache.keys.abs().sum(dim=(0, 2, 3, 4)).nonzero()[:, 0].tolist()
    assert set(written) <= used | {backend.scratch_page}


def test_attention_that_cannot_be_recorded_is_launched() -> None:
    recorder = ReplayingRecorder()
    drive(runner(recorder=recorder, by_torch=True), max_tokens=2)
    assert not recorder.recorded
