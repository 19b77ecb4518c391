"""Small configurations of many architectures.

Owns: for each name the class in `transformers` and the values that make a model of it small.
Does not know: weights, files (`tiny_model.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

STANDARD_DEVIATION = 0.15
VOCAB_SIZE = 320  # 256 bytes, four special tokens, and logits that have no token


class TinyArchitecture(NamedTuple):
    """One of them.

    Attributes:
        model: name of the class.
        settings: of its configuration, beside `SHAPE`.
    """

    model: str
    settings: Mapping[str, Any] = MappingProxyType({})


SHAPE: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": STANDARD_DEVIATION,
        "eos_token_id": 256,
        "bos_token_id": None,
        "pad_token_id": None,
    }
)
_ROPE = MappingProxyType({"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64})
_LLAMA3_ROPE = {**_ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
_GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 512}

# With a decoder of their own.
OWN: Mapping[str, TinyArchitecture] = MappingProxyType(
    {
        "llama": TinyArchitecture("LlamaForCausalLM"),
        "llama3-rope": TinyArchitecture(
            "LlamaForCausalLM", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}
        ),
        "yarn-rope": TinyArchitecture("LlamaForCausalLM", {"rope_parameters": {**_ROPE, "rope_type": "yarn"}}),
        "mistral": TinyArchitecture("MistralForCausalLM", {"sliding_window": 24}),
        "qwen2": TinyArchitecture("Qwen2ForCausalLM"),
        "qwen3": TinyArchitecture("Qwen3ForCausalLM", {"head_dim": 16}),
        "qwen3-moe": TinyArchitecture("Qwen3MoeForCausalLM", {"head_dim": 16, "mlp_only_layers": [1], **_EXPERTS}),
    }
)

# Inside `transformers`, by its attention interface.
HOOKED: Mapping[str, TinyArchitecture] = MappingProxyType(
    {
        "gpt2": TinyArchitecture("GPT2LMHeadModel", {**_GPT2, "scale_attn_by_inverse_layer_idx": True}),
        "gpt-neox": TinyArchitecture("GPTNeoXForCausalLM", {"rotary_pct": 0.5}),
        "opt": TinyArchitecture("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 32}),
        "phi3": TinyArchitecture("Phi3ForCausalLM", {"sliding_window": 24}),
        "gemma2": TinyArchitecture(
            "Gemma2ForCausalLM",
            {"head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20},
        ),
        "gemma3": TinyArchitecture(
            "Gemma3ForCausalLM",
            {
                "head_dim": 16,
                "sliding_window": 24,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        "gpt-j": TinyArchitecture("GPTJForCausalLM", {**_GPT2, "rotary_dim": 4}),
        "olmo2": TinyArchitecture("Olmo2ForCausalLM"),
        "gpt-oss": TinyArchitecture(
            "GptOssForCausalLM",
            {
                "head_dim": 16,
                "sliding_window": 24,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        "mixtral": TinyArchitecture("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        "deepseek-v3": TinyArchitecture(
            "DeepseekV3ForCausalLM",
            {
                "num_key_value_heads": 6,
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 12,
                "qk_rope_head_dim": 8,
                "v_head_dim": 10,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 40,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
            },
        ),
    }
)

# Whose answers would be wrong, so that they are refused.
REFUSED: Mapping[str, TinyArchitecture] = MappingProxyType(
    {
        "bloom": TinyArchitecture("BloomForCausalLM", {"n_layer": 3, "n_head": 6}),
        "falcon": TinyArchitecture("FalconForCausalLM", {"alibi": True}),
        "mpt": TinyArchitecture("MptForCausalLM", {"d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 512}),
        "mamba": TinyArchitecture("MambaForCausalLM", {"state_size": 8}),
        "gpt-neo": TinyArchitecture(
            "GPTNeoForCausalLM",
            {"num_layers": 3, "num_heads": 6, "attention_types": [[["global", "local"], 1], [["global"], 1]]},
        ),
        "bert": TinyArchitecture("BertLMHeadModel"),
        "lfm2": TinyArchitecture("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"]}),
        "llama4": TinyArchitecture(
            "Llama4ForCausalLM",
            {
                "head_dim": 16,
                "attention_chunk_size": 24,
                "num_local_experts": 2,
                "intermediate_size_mlp": 96,
                "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            },
        ),
    }
)
