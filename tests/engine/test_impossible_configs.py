"""A `config.json` with a value that cannot be is refused by its key, before anything is computed from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from busllm.engine.models.config import read_config
from busllm.errors import ModelError
from busllm.model_store.description import check_small_files
from busllm.model_store.files import small_files
from busllm.testing.tiny_model import write_tiny_model

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "llama")
    decoded: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return decoded


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as error:
        read_config(raw)
    return error.value.message


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("num_key_value_heads", ["2", 0, -1, 2.0, True, [2]]),
        ("num_attention_heads", [None, "4", 0, -4, True, 2**40]),
        ("head_dim", ["8", 0, -8, 7, 8.5]),
        ("hidden_size", [True, 48.0, None, "48", 10**30]),
        ("intermediate_size", [None, 0, "64"]),
        ("num_hidden_layers", [None, 0, 10**9, "3"]),
        ("vocab_size", ["10", 0]),
        ("max_position_embeddings", ["256", 0, None]),
        ("rms_norm_eps", [None, "x", -1.0, float("nan"), float("inf"), False]),
        ("tie_word_embeddings", ["no", 1]),
        ("attention_bias", ["yes"]),
        ("architectures", ["LlamaForCausalLM", [None], [], None, [["LlamaForCausalLM"]]]),
        ("rope_parameters", [[1], "linear", 7]),
    ],
)
def test_a_value_of_the_wrong_type_or_size_is_refused_by_its_key(
    tiny: dict[str, Any], key: str, values: list[object]
) -> None:
    for value in values:
        message = refusal(tiny | {key: value})
        assert "config.json" in message, value
        assert key in message, value


def test_weights_in_a_format_that_is_only_named_are_refused(tiny: dict[str, Any]) -> None:
    assert "'gptq', which is not supported" in refusal(tiny | {"quantization_config": "gptq"})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": -5.0}, "rope_theta"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor"),
        (LLAMA3 | {"original_max_position_embeddings": "x"}, "original_max_position_embeddings"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 0}, "factor"),
        ({"rope_type": "yarn", "factor": -2}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}, "beta_fast"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": 5}, "short_factor"),
    ],
)
def test_rotary_settings_that_cannot_be_are_refused_by_their_key(
    tiny: dict[str, Any], settings: dict[str, object], key: str
) -> None:
    assert f"config.json has {key} =" in (message := refusal(tiny | {"rope_parameters": settings})) or (
        f"config.json has no {key};" in message
    )


def test_the_older_spelling_of_rotary_settings_is_checked_alike(tiny: dict[str, Any]) -> None:
    older = {key: value for key, value in tiny.items() if key != "rope_parameters"}
    assert "rope_scaling = 'linear'" in refusal(older | {"rope_scaling": "linear"})
    assert "rope_theta = 'x'" in refusal(older | {"rope_theta": "x"})


@pytest.mark.parametrize("window", [0, -1, "16", True])
def test_a_window_that_shows_nothing_is_refused(tiny: dict[str, Any], window: object) -> None:
    raw = tiny | {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    assert f"sliding_window = {window!r}" in refusal(raw)
    raw |= {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
    assert f"sliding_window = {window!r}" in refusal(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", "4"),
        ("num_experts_per_tok", 0),
        ("decoder_sparse_step", 0),
        ("mlp_only_layers", "all"),
        ("moe_intermediate_size", None),
    ],
)
def test_experts_that_cannot_be_are_refused(tiny: dict[str, Any], key: str, value: object) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    raw = tiny | experts | {"architectures": ["Qwen3MoeForCausalLM"]}
    assert read_config(raw).experts is not None
    assert key in refusal(raw | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", [None]),
        ("vocab_size", "10"),
        ("max_position_embeddings", True),
        ("rope_parameters", [1]),
        ("rope_parameters", {"rope_type": "longrope", "original_max_position_embeddings": "x"}),
    ],
)
def test_stages_without_an_engine_refuse_them_too(tmp_path: Path, tiny: dict[str, Any], key: str, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny | {key: value}))
    with pytest.raises(ModelError, match=r"config\.json has (architectures|vocab_size|max_|rope_|original_max_)"):
        check_small_files(small_files(tmp_path, "tiny"))
