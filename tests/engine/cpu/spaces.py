"""Working memory for linears alone."""

from __future__ import annotations

from busllm.engine.cpu.kernels import prepare_kernels
from busllm.engine.cpu.shapes import Workspace

prepare_kernels()

from busllm.engine.cpu.workspace import make_workspace  # noqa: E402
from busllm.engine.models.config import ModelConfig  # noqa: E402
from busllm.engine.models.rope_config import RopeConfig  # noqa: E402


def workspace(columns: int, rows: int) -> Workspace:
    """For rows of so many columns."""
    config = ModelConfig(
        architecture="test",
        vocab_size=16,
        hidden_size=columns,
        intermediate_size=columns,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_context_tokens=16,
        rope=RopeConfig(16, 1e4),
        tie_word_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        layer_windows=(None,),
    )
    return make_workspace(config, rows)
