"""Weights and settings that give no numbers are refused at load; a request that does ends alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from busllm.engine.attention.protocol import Attention
from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.loader import LoadConfig, load_runner
from busllm.errors import ModelError
from busllm.sampling import SamplingParams
from busllm.testing.engine_driver import EngineDriver, sequence_request
from busllm.testing.tiny_model import write_tiny_model
from tests.engine.logits import KeptLogits

LAYER = "model.layers.1."
POISON = 77
WAYS: dict[str, dict[str, Any]] = {
    "torch": {"attention": "torch"},
    **{name: {"attention": "cpu", "quantization": name} for name in ("none", "int8", "int4")},
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "llama", attention_bias=True)


def spoil(directory: Path, name: str, value: float) -> None:
    """One value of a tensor."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.embed_tokens.weight", torch.nan),
        ("lm_head.weight", torch.inf),
        (LAYER + "self_attn.v_proj.weight", -torch.inf),
        (LAYER + "mlp.down_proj.weight", torch.nan),
        (LAYER + "self_attn.q_proj.bias", torch.nan),
        (LAYER + "input_layernorm.weight", torch.inf),
        ("model.norm.weight", torch.nan),
    ],
)
def test_a_value_that_is_no_number_is_refused_by_its_tensor(tiny: Path, way: str, name: str, value: float) -> None:
    spoil(tiny, name, value)
    with pytest.raises(ModelError, match=rf"values that are not finite.*: {name.replace('.', '[.]')}\.$"):
        load_runner(str(tiny), LoadConfig(device="cpu", **WAYS[way]))


def test_a_value_too_large_for_the_number_format_is_refused(tiny: Path) -> None:
    spoil(tiny, "lm_head.weight", 1e5)
    load_runner(str(tiny), LoadConfig(device="cpu", dtype="float32"))
    with pytest.raises(ModelError, match=r"too large for the number format .*: lm_head[.]weight"):
        load_runner(str(tiny), LoadConfig(device="cpu", dtype="float16"))


def test_weights_that_are_numbers_and_give_none_are_refused(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], 3e38)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 1e4)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="computes numbers that are not finite"):
        load_runner(str(tiny), LoadConfig(device="cpu", attention="torch"))


class Poisoned(KeptLogits):
    """A decoder that loses the numbers of one token."""

    def hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache_slots: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        states = super().hidden_states(token_ids, positions, cache_slots, attention)
        return torch.where((token_ids == POISON)[:, None], torch.nan, states)


def answers(tiny: Path, *prompts: list[int]) -> EngineDriver:
    """Uids count from u0; of the first one the token is drawn."""
    runner = load_runner(str(tiny), LoadConfig(device="cpu", attention="torch"))
    runner._decoder = Poisoned(runner._decoder)
    driver = EngineDriver(Engine(runner, EngineConfig(num_pages=64)))
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0 if number else 1.0, max_tokens=8, logit_bias=((POISON, -100.0),))
        driver.submit(sequence_request(f"u{number}", prompt, params))
    driver.run()
    return driver


def test_a_request_without_numbers_ends_with_an_error_and_the_others_go_on(tiny: Path) -> None:
    good = [[5, 6, 7], [9, 8, 7, 6]]
    expected, actual = answers(tiny, good[0], *good), answers(tiny, [5, POISON], *good)
    assert not expected.failures
    for key in (("u1", 0), ("u2", 0)):
        assert actual.records[key] == expected.records[key]
        assert len(actual.records[key].output) > 1
    assert actual.records["u0", 0].output == []
    assert set(actual.failures) == {("u0", 0)}
    error = actual.failures["u0", 0]
    assert isinstance(error, ModelError) and "not finite for this request" in error.message
