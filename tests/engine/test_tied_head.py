"""A model whose embedding is its head: one that stores another head is computed with that one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from busllm.engine.loader import LoadConfig, load_runner
from busllm.errors import ModelError
from busllm.testing.llama_reference import reference_logprobs
from busllm.testing.plan_driver import DrivenSequence, PlanDriver
from busllm.testing.tiny_model import write_tiny_model
from tests.engine.reference import load_reference
from tests.engine.tiny import greedy

PROMPT = [5, 6, 7, 8]
TOLERANCE = {"torch": 1e-4, "cpu": 0.15}

Attention = Literal["torch", "cpu"]


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tied", "llama", tie_word_embeddings=True)


def store_head(directory: Path, head: torch.Tensor | None) -> None:
    """None = the embedding once more."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if head is None else head.to(embedding.dtype)
    save_file(tensors, path, metadata={"format": "pt"})


def generate(directory: Path, attention: Attention) -> DrivenSequence:
    quantization: Literal["auto", "int8"] = "int8" if attention == "cpu" else "auto"
    runner = load_runner(str(directory), LoadConfig(device="cpu", attention=attention, quantization=quantization))
    return PlanDriver(runner).run(DrivenSequence(PROMPT, greedy(6)))[0]


@pytest.mark.parametrize("attention", ["torch", "cpu"])
def test_a_stored_head_that_differs_is_used_as_transformers_does(tied: Path, attention: Attention) -> None:
    store_head(tied, torch.randn(320, 48, generator=torch.Generator().manual_seed(1)) * 0.15)
    done = generate(tied, attention)
    expected = reference_logprobs(load_reference(tied), [*PROMPT, *done.output])[len(PROMPT) - 1 : -1]
    for row, token_id, entry in zip(expected, done.output, done.logprobs, strict=True):
        assert abs(row[token_id] - entry.chosen) < TOLERANCE[attention]


@pytest.mark.parametrize("attention", ["torch", "cpu"])
def test_the_embedding_stored_once_more_changes_nothing(tied: Path, attention: Attention) -> None:
    before = generate(tied, attention)
    store_head(tied, None)
    after = generate(tied, attention)
    assert (after.output, after.logprobs) == (before.output, before.logprobs)


@pytest.mark.parametrize("attention", ["torch", "cpu"])
def test_a_stored_head_of_another_shape_is_refused(tied: Path, attention: Attention) -> None:
    store_head(tied, torch.zeros(7, 48))
    with pytest.raises(ModelError, match=r"lm_head\.weight is 7 x 48 and should be 320 x 48"):
        generate(tied, attention)
