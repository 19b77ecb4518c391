"""What `transformers` says about a Llama's files: the reference that forward passes are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from busllm.model_store.files import ModelFiles, read_json
from busllm.model_store.weights import iter_tensors


def load_llama_reference(files: ModelFiles) -> PreTrainedModel:
    """A Llama with the dequantised weights of a GGUF, in float32."""
    assert files.config is not None, "the null model has no weights"
    settings: dict[str, Any] = {**read_json(files.config), "attn_implementation": "eager"}
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    state = {name: torch.tensor(tensor.to_float32()) for name, tensor in iter_tensors(files)}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its frequencies are no part of a checkpoint
    model.eval()
    return cast("PreTrainedModel", model)


@torch.inference_mode()
def reference_logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """float32 (num_tokens, vocab_size): log probabilities of what follows each token."""
    logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits.float().log_softmax(dim=-1)
