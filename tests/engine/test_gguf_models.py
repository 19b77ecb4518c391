"""Models out of GGUF files, from the file to the tokens: the same as a checkpoint with the file's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType

from busllm.engine.layers.rope import frequencies
from busllm.engine.loader import load_runner
from busllm.engine.models.rope_config import Llama3Scaling, RopeConfig
from busllm.errors import ModelError
from busllm.testing.plan_driver import DrivenSequence
from busllm.testing.tiny_gguf import write_tiny_gguf
from busllm.testing.tiny_model import write_tiny_model
from tests.engine.reference import assert_matches, load_reference
from tests.engine.tiny import driver, greedy, prompts

PROMPTS = prompts((1, 40))
FORMATS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
WHOLE_BLOCKS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 64,
}
MOE = {"moe_intermediate_size": 256, "mlp_only_layers": []}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSLLM_CACHE", str(tmp_path / "cache"))


def assert_same_as_its_checkpoint(directory: Path, gguf: Path) -> None:
    reference = load_reference(directory)
    sequences = (DrivenSequence(p, greedy(8), chunk_tokens=33, start_step=i) for i, p in enumerate(PROMPTS))
    for sequence in driver(gguf).run(*sequences):
        assert_matches(reference, sequence, 1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read_as_the_values_that_it_means(tmp_path: Path, name: str) -> None:
    directory = write_tiny_model(tmp_path / "model", "llama", **WHOLE_BLOCKS)
    assert_same_as_its_checkpoint(
        directory, write_tiny_gguf(directory, tmp_path / "model.gguf", GGMLQuantizationType[name])
    )


@pytest.mark.parametrize(
    ("architecture", "changes", "name"),
    [
        ("llama", {"tie_word_embeddings": True}, "Q8_0"),
        ("mistral", {"sliding_window": None}, "Q4_K"),
        ("qwen2", {}, "Q4_K"),
        ("qwen3", {"tie_word_embeddings": True}, "Q8_0"),
        ("qwen3-moe", MOE, "Q4_K"),
        ("qwen3-moe", MOE, "Q4_1"),
    ],
)
def test_each_family_is_read(tmp_path: Path, architecture: str, changes: dict[str, Any], name: str) -> None:
    directory = write_tiny_model(tmp_path / "model", architecture, **(WHOLE_BLOCKS | changes))
    assert_same_as_its_checkpoint(
        directory, write_tiny_gguf(directory, tmp_path / "model.gguf", GGMLQuantizationType[name])
    )


def test_llama_3_rope_is_read_from_its_factors(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = scaling | {"rope_type": "llama3", "rope_theta": 10000.0}
    directory = write_tiny_model(tmp_path / "model", "llama", rope_parameters=rope, **WHOLE_BLOCKS)
    plain = RopeConfig(head_dim=64, theta=10000.0)
    scaled = RopeConfig(head_dim=64, theta=10000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
    factors = (frequencies(plain) / frequencies(scaled)).numpy()
    gguf = write_tiny_gguf(directory, tmp_path / "model.gguf", GGMLQuantizationType.Q8_0, rope_factors=factors)
    assert_same_as_its_checkpoint(directory, gguf)


def test_a_file_of_another_architecture_is_refused_with_those_that_can_be_served(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "gemma2")
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'gemma2'; from GGUF these can be served: llama, qwen2, qwen3, qwen3moe"):
        load_runner(str(tmp_path / "model.gguf"))
