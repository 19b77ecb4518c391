"""What `transformers` says about the same files: the reference that the forward pass is compared with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from busllm.testing.llama_reference import reference_logprobs
from busllm.testing.plan_driver import DrivenSequence


def load_reference(directory: Path) -> PreTrainedModel:
    """Reads a checkpoint in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def assert_matches(model: PreTrainedModel, sequence: DrivenSequence, tolerance: float) -> None:
    """The generated tokens are the most likely ones, and their log probabilities are the reference's."""
    logprobs = reference_logprobs(model, [*sequence.prompt, *sequence.output])[len(sequence.prompt) - 1 : -1]
    assert sequence.output == logprobs.argmax(dim=-1).tolist()
    expected = logprobs.gather(1, torch.tensor(sequence.output)[:, None])[:, 0]
    actual = torch.tensor([entry.chosen for entry in sequence.logprobs])
    assert (actual - expected).abs().max() < tolerance
