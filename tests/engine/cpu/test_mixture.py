"""Models with experts by the compiled pass: the reference's numbers on the same weights, from every kind of file.

Rounding may send a row to another expert, which few tokens show; so what is compared is the difference that four of
five tokens stay below, and where every token goes through all experts the largest one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedModel

from busllm.engine.cpu.blocks import quantise
from busllm.engine.cpu.shapes import Format
from busllm.engine.loader import LoadConfig, load_runner
from busllm.errors import ModelError
from busllm.testing.plan_driver import DrivenSequence, PlanDriver
from busllm.testing.tiny_gguf import write_tiny_gguf
from busllm.testing.tiny_model import write_tiny_model
from tests.engine.cpu.test_forward import FORMATS, PROMPTS, Quantization, differences, load
from tests.engine.cpu.weights import to_float32
from tests.engine.reference import load_reference
from tests.engine.test_gguf_models import MOE, WHOLE_BLOCKS
from tests.engine.tiny import assert_same_bits, greedy

TOLERANCE = 0.1
VARIANTS: dict[str, dict[str, Any]] = {
    "a dense layer in between": {},
    "every second layer, many experts": {"mlp_only_layers": [], "decoder_sparse_step": 2, "num_experts": 19},
    "experts everywhere, one per token": {"mlp_only_layers": [], "num_experts_per_tok": 1},
    "unscaled shares": {"norm_topk_prob": False, "num_experts_per_tok": 3},
    "all experts": {"num_experts_per_tok": 5},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in `test_forward.py`."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def rounded(directory: Path, to: Path, quantization: Quantization) -> Path:
    """The same checkpoint with the weights that a format stands for; the router keeps its own."""
    shutil.copytree(directory, to)
    tensors = load_file(to / "model.safetensors")
    for name, weight in tensors.items():
        if weight.ndim == 2 and not name.endswith("mlp.gate.weight"):
            is_outer = name in ("model.embed_tokens.weight", "lm_head.weight")
            kind = Format.INT8 if quantization == "int4" and is_outer else FORMATS[quantization]
            tensors[name] = np.ascontiguousarray(to_float32(quantise(weight, kind), weight.shape[1]))
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def sequences() -> list[DrivenSequence]:
    return [DrivenSequence(p, greedy(6), chunk_tokens=29, start_step=index) for index, p in enumerate(PROMPTS)]


def usual_difference(model: PreTrainedModel, done: tuple[DrivenSequence, ...]) -> float:
    """The largest, but for a fifth of the tokens."""
    return float(np.quantile(list(differences(model, done)), 0.8))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_format_gives_the_numbers_of_its_weights(
    tmp_path: Path, variant: str, quantization: Quantization
) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen3-moe", **VARIANTS[variant])
    reference = load_reference(rounded(directory, tmp_path / "rounded", quantization))
    done = PlanDriver(load(directory, quantization)).run(*sequences())
    assert usual_difference(reference, done) < TOLERANCE
    if variant == "all experts":
        assert max(differences(reference, done)) < TOLERANCE


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "BF16"])
def test_the_experts_of_a_gguf_are_read(tmp_path: Path, name: str) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen3-moe", **WHOLE_BLOCKS, **MOE)
    gguf = write_tiny_gguf(directory, tmp_path / "model.gguf", GGMLQuantizationType[name])
    runner = load_runner(str(gguf), LoadConfig(device="cpu", attention="cpu"))
    assert usual_difference(load_reference(directory), PlanDriver(runner).run(*sequences())) < 2 * TOLERANCE


@pytest.mark.parametrize(
    "overrides", [{"norm_topk_prob": False}, {"num_experts_per_tok": 1}, {"mlp_only_layers": []}, {"num_experts": 4}]
)
def test_another_configuration_is_another_model(tmp_path: Path, overrides: dict[str, Any]) -> None:
    """Else the comparisons above would show nothing."""
    reference = load_reference(write_tiny_model(tmp_path / "model", "qwen3-moe"))
    other = write_tiny_model(tmp_path / "other", "qwen3-moe", **overrides)
    difference = usual_difference(reference, PlanDriver(load(other, "none")).run(*sequences()))
    assert difference > 2 * TOLERANCE


def test_experts_that_have_changed_places_are_noticed(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen3-moe")
    reference, path = load_reference(directory), directory / "model.safetensors"
    tensors = load_file(path)
    for projection in ("gate_proj", "up_proj", "down_proj"):
        one, other = (f"model.layers.0.mlp.experts.{expert}.{projection}.weight" for expert in (1, 3))
        tensors[one], tensors[other] = tensors[other], tensors[one]
    save_file(tensors, path, metadata={"format": "pt"})
    difference = usual_difference(reference, PlanDriver(load(directory, "none")).run(*sequences()))
    assert difference > 2 * TOLERANCE


def test_rows_that_all_go_to_the_same_experts_have_the_same_bits_as_alone(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen3-moe", num_experts=12)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name] = np.zeros_like(tensors[name])  # every share is the same, so experts 0 and 1 have all rows
    save_file(tensors, path, metadata={"format": "pt"})
    driver = PlanDriver(load(directory, "int4"))
    alone = [driver.run(DrivenSequence(prompt, greedy()))[0] for prompt in PROMPTS]
    assert_same_bits(driver.run(*(DrivenSequence(prompt, greedy()) for prompt in PROMPTS)), alone)


def test_the_packed_form_of_experts_is_kept_and_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busllm.engine.cpu.load.WORTH_KEEPING_BYTES", 0)
    directory = write_tiny_model(tmp_path / "model", "qwen3-moe")
    packed = [PlanDriver(load(directory, "int4")).run(DrivenSequence(PROMPTS[-1], greedy())) for _ in range(2)]
    assert_same_bits(*packed)


def test_an_expert_that_is_missing_or_not_finite_is_named(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen3-moe")
    path, name = directory / "model.safetensors", "model.layers.2.mlp.experts.3.up_proj.weight"
    tensors = load_file(path)
    tensors[name][0, 0] = np.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"not finite.*layers\.2\.mlp\.experts\.3\.up_proj"):
        load(directory)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing: model\.layers\.2\.mlp\.experts\.3\.up_proj"):
        load(directory)
