"""The default model, compiled: as close to float32 as its formats are, and one text in every company."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from busllm.engine.cpu import packed_file
from busllm.engine.cpu.kernels import prepare_kernels
from busllm.engine.loader import LoadConfig, load_runner
from busllm.engine.model_runner import ModelRunner
from busllm.errors import ModelError
from busllm.model_store.files import ModelFiles
from busllm.model_store.resolve import resolve
from busllm.testing.llama_reference import load_llama_reference, reference_logprobs
from busllm.testing.plan_driver import DrivenSequence, PlanDriver
from busllm.text.tokenizer import load_tokenizer
from tests.engine.tiny import assert_same_bits, greedy, prompts

prepare_kernels()

from busllm.engine.cpu.one_sequence import logits_of  # noqa: E402

TEXT = (Path(__file__).parents[3] / "LICENSE").read_text()


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    try:
        return resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def runner(files: ModelFiles) -> ModelRunner:
    return load_runner(files, LoadConfig(device="cpu", attention="cpu"))


@pytest.fixture(scope="module")
def text_ids(files: ModelFiles) -> list[int]:
    return list(load_tokenizer(files).encode_batch([TEXT], add_special_tokens=True)[0])[:400]


@pytest.fixture(scope="module")
def expected(files: ModelFiles, text_ids: list[int]) -> torch.Tensor:
    return reference_logprobs(load_llama_reference(files), text_ids)


# Mean divergence from float32 on the file's own weights: what a format costs, its rounding of weights included.
@pytest.mark.parametrize(("quantization", "divergence", "agreement"), [("auto", 2e-3, 0.975), ("none", 1e-3, 0.98)])
def test_the_distributions_are_those_of_float32(
    files: ModelFiles,
    text_ids: list[int],
    expected: torch.Tensor,
    quantization: Literal["auto", "none"],
    divergence: float,
    agreement: float,
) -> None:
    runner = load_runner(files, LoadConfig(device="cpu", attention="cpu", quantization=quantization))
    actual = logits_of(runner._decoder, text_ids).log_softmax(dim=-1)  # type: ignore[arg-type]
    assert float((expected.exp() * (expected - actual)).sum(dim=-1).mean()) < divergence
    assert float((expected.argmax(dim=-1) == actual.argmax(dim=-1)).float().mean()) >= agreement


def test_the_most_likely_tokens_are_float32s_at_least_as_often_as_those_of_bfloat16(
    files: ModelFiles, runner: ModelRunner, text_ids: list[int], expected: torch.Tensor
) -> None:
    """But for half a point."""
    in_bfloat16 = reference_logprobs(load_llama_reference(files).bfloat16(), text_ids)
    actual = logits_of(runner._decoder, text_ids)  # type: ignore[arg-type]
    ours, theirs = (
        float((expected.argmax(dim=-1) == other.argmax(dim=-1)).float().mean()) for other in (actual, in_bfloat16)
    )
    assert ours >= theirs - 0.005


def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_chunks(runner: ModelRunner) -> None:
    driver = PlanDriver(runner)
    texts = prompts((2, 21, 60, 140), vocab_size=49152)
    single = [driver.run(DrivenSequence(prompt, greedy()))[0] for prompt in texts]
    batched = driver.run(*(DrivenSequence(p, greedy(), chunk_tokens=17, start_step=i) for i, p in enumerate(texts)))
    assert_same_bits(batched, single)


def test_a_second_start_maps_the_packed_weights(files: ModelFiles, runner: ModelRunner) -> None:
    from busllm.model_store.description import describe

    path = packed_file.packed_path(files.weights[0], describe(files).fingerprint, "auto")
    packed = packed_file.load(path)
    assert packed is not None
    assert packed.label == "int4+int8"
    assert runner.model.attention.endswith("int4+int8)")
