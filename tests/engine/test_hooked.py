"""Models that run inside `transformers`: served when they pass the test at load, refused with the reason when not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from busllm.engine.attention.protocol import AttentionConfig
from busllm.engine.attention.torch_attention import TorchAttention
from busllm.engine.loader import LoadConfig, load_runner
from busllm.engine.models.hooked import hook, survey
from busllm.engine.models.hooked.load import HookedSettings, load_hooked
from busllm.errors import ModelError
from busllm.testing.plan_driver import DrivenSequence
from busllm.testing.tiny_architectures import HOOKED, REFUSED
from busllm.testing.tiny_model import write_tiny_model
from tests.engine.logits import assert_logits_match
from tests.engine.reference import assert_matches, load_reference
from tests.engine.tiny import driver, greedy, prompts

PROMPTS = prompts((1, 17, 40))
REASONS = {
    "bloom": "take no positions",
    "falcon": "its code in transformers stopped",
    "mpt": "take no positions",
    "mamba": "take no positions",
    "gpt-neo": "called through the interface 0 times, and it has 3 layers",
    "lfm2": "called through the interface 1 times, and it has 3 layers",
    "llama4": "layers of the kind 'chunked_attention'",
    "bert": "looks ahead",
}


@pytest.mark.parametrize("architecture", HOOKED)
def test_ragged_steps_give_the_tokens_and_logits_of_transformers(tmp_path: Path, architecture: str) -> None:
    directory = write_tiny_model(tmp_path / "model", architecture)
    sequences = (DrivenSequence(p, greedy(12), chunk_tokens=15, start_step=i) for i, p in enumerate(PROMPTS))
    assert_logits_match(directory, load_reference(directory), *sequences)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt-oss"])
def test_half_precision_passes_the_test_at_load_too(tmp_path: Path, architecture: str) -> None:
    directory = write_tiny_model(tmp_path / "model", architecture)
    sequence = DrivenSequence(PROMPTS[1], greedy(2))
    driver(directory, dtype="bfloat16").run(sequence)
    assert len(sequence.output) == 2


def test_a_cached_prefix_is_read(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "gemma3")
    reference, one = load_reference(directory), driver(directory)
    (first,) = one.run(DrivenSequence(PROMPTS[2], greedy()))
    (again,) = one.run(DrivenSequence(PROMPTS[2], greedy(), cached=(first, 32)))
    assert_matches(reference, again, 1e-4)


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_would_answer_wrongly_is_refused_with_the_reason(tmp_path: Path, architecture: str) -> None:
    directory = write_tiny_model(tmp_path / "model", architecture)
    with pytest.raises(ModelError, match=f"{REFUSED[architecture].model} cannot be served: .*{REASONS[architecture]}"):
        load_runner(str(directory))


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("phi3", {"window": None}),
    "soft cap": ("gemma2", {"soft_cap": None}),
    "sinks": ("gpt-oss", {"sinks": None}),
    "scale": ("gpt2", {"scale": 1.0}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_test_at_load_notices_each_argument_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, dtype: str
) -> None:
    architecture, lost = FAULTS[fault]
    directory = write_tiny_model(tmp_path / "model", architecture)
    whole_call = hook.AttentionCall
    monkeypatch.setattr(hook, "AttentionCall", lambda **values: whole_call(**(values | lost)))
    monkeypatch.setattr(survey, "_check_windows", lambda config, windows: None)
    with pytest.raises(ModelError, match="side by side"):
        load_runner(str(directory), LoadConfig(dtype=dtype))


WIDE = 400  # beyond what a test at load computes


@pytest.mark.parametrize("architecture", ["phi3", "gemma2", "gemma3", "gpt-oss"])
def test_a_wide_window_is_tested_short_and_served_wide(tmp_path: Path, architecture: str) -> None:
    directory = write_tiny_model(tmp_path / "model", architecture, sliding_window=WIDE)
    runner = load_runner(str(directory), LoadConfig(dtype="float32", attention="torch"))
    windows = set(runner._decoder.config.attention_shape.layer_windows)
    assert windows - {None} == {WIDE}


@pytest.mark.parametrize("architecture", ["phi3", "gemma2"])
def test_the_test_at_load_looks_beyond_a_wide_window(tmp_path: Path, architecture: str) -> None:
    class BlindToWindows(TorchAttention):
        def __init__(self, config: AttentionConfig) -> None:
            super().__init__(structs.replace(config, layer_windows=(None,) * len(config.layer_windows)))

    directory = write_tiny_model(tmp_path / "model", architecture, sliding_window=WIDE)
    raw = json.loads((directory / "config.json").read_text())
    settings = HookedSettings(BlindToWindows, 512, torch.device("cpu"), torch.float32)
    with pytest.raises(ModelError, match="side by side"):
        load_hooked(directory, raw, settings)


class ForgetfulAttention(TorchAttention):
    """A backend that does not know of soft caps."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(structs.replace(config, soft_cap=None))


def test_an_attention_backend_that_ignores_a_soft_cap_does_not_get_the_model(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "gemma2")
    raw = json.loads((directory / "config.json").read_text())
    settings = HookedSettings(ForgetfulAttention, 512, torch.device("cpu"), torch.float32)
    with pytest.raises(ModelError, match="side by side"):
        load_hooked(directory, raw, settings)


def test_a_window_that_stands_in_the_configuration_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_model(tmp_path / "model", "phi3")
    monkeypatch.setattr(hook, "_window", lambda sliding_window: None)
    with pytest.raises(ModelError, match="window of 24 tokens, which its attention is not told"):
        load_runner(str(directory))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "has an encoder"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "answers to images"),
        ({"architectures": ["ViTForImageClassification"]}, "classifies images"),
        ({"architectures": ["BertForSequenceClassification"]}, "classifies texts"),
        ({"architectures": ["BertForMaskedLM"]}, "fills gaps"),
        ({"architectures": ["Qwen2Model"]}, "gives embeddings"),
        ({"architectures": ["SomethingForCausalLM"]}, "this version of transformers does not have it"),
        ({"architectures": ["SomethingForCausalLM"], "auto_map": {"AutoModel": "x.Y"}}, "code of its own"),
        ({"architectures": ["OPTForCausalLM"], "quantization_config": {"quant_method": "awq"}}, "format 'awq'"),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "gptq"}}, "format 'gptq'"),
        ({"architectures": []}, "does not name an architecture"),
    ],
)
def test_another_kind_of_model_is_refused_before_it_is_read(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    directory = write_tiny_model(tmp_path / "model", "llama")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        load_runner(str(directory))


def test_a_missing_tensor_is_named_and_not_made_up(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "olmo2")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_runner(str(directory))


def test_the_layers_of_transformers_are_imported_for_other_architectures_only(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen3")
    program = (
        "import sys; from busllm.engine.loader import LoadConfig, load_runner; "
        "load_runner(sys.argv[1], LoadConfig(device='cpu', attention='torch')); "
        "sys.exit('busllm.engine.models.hooked' in sys.modules or 'transformers.modeling_utils' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(directory)], check=True, timeout=60)
