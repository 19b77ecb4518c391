"""What `transformers` says about the same files: the reference that the forward pass is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from busllm.model_store.files import ModelFiles, read_json
from busllm.model_store.weights import iter_tensors
from busllm.testing.plan_driver import DrivenSequence


def load_reference(directory: Path) -> PreTrainedModel:
    """Reads a checkpoint in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def load_llama_reference(files: ModelFiles) -> PreTrainedModel:
    """A Llama with the dequantised weights of a GGUF."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**read_json(files.config), attn_implementation="eager"))
    state = {name: torch.tensor(tensor.to_float32()) for name, tensor in iter_tensors(files)}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its frequencies are no part of a checkpoint
    return model.eval()


@torch.inference_mode()
def reference_logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """float32 (num_tokens, vocab_size): log probabilities of what follows each token."""
    return model(torch.tensor([list(token_ids)])).logits[0].log_softmax(dim=-1)


def assert_matches(model: PreTrainedModel, sequence: DrivenSequence, tolerance: float) -> None:
    """The generated tokens are the most likely ones, and their log probabilities are the reference's."""
    logprobs = reference_logprobs(model, [*sequence.prompt, *sequence.output])[len(sequence.prompt) - 1 : -1]
    assert sequence.output == logprobs.argmax(dim=-1).tolist()
    expected = logprobs.gather(1, torch.tensor(sequence.output)[:, None])[:, 0]
    actual = torch.tensor([entry.chosen for entry in sequence.logprobs])
    assert (actual - expected).abs().max() < tolerance
