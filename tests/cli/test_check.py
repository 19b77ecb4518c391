"""`busllm check` says before a start what the start would say, in the same words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from busllm.cli.main import main
from busllm.engine.foresight import foresee
from busllm.engine.forward_choice import ForwardWish
from busllm.errors import BusllmError
from busllm.model_store.resolve import resolve
from busllm.testing.tiny_model import write_tiny_model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def check(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> tuple[int, str, str]:
    """Checks a file with this text; returns status, stdout and stderr."""
    file = tmp_path / "t.toml"
    file.write_text(text)
    status = main(["check", "--topology", str(file)])
    out, err = capsys.readouterr()
    return status, out, err.replace(str(file), "t.toml")


def become(directory: Path, **values: object) -> None:
    """Changes a model's configuration."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "scheduler.step_tokens = 16",
            "t.toml:1: scheduler.step_tokens: is 16; every running sequence needs one",
        ),
        (
            "scheduler.attention = 'cpu'\nscheduler.page_tokens = 24",
            "t.toml:2: scheduler.page_tokens: is 24; the compiled forward pass needs a multiple of 16.",
        ),
        (
            "model.quantization = 'int4'\nscheduler.attention = 'torch'",
            "t.toml:1: model.quantization: is 'int4', which only the compiled",
        ),
        (
            "model.quantization = 'int8'\nmodel.dtype = 'bfloat16'",
            "t.toml:1: model.quantization: is 'int8', which",
        ),
        ("model.quantization = 'int8'\nscheduler.tensor_parallel = 2", "it is split among 2 ranks"),
        ("scheduler.attention = 'nope'", "t.toml:1: scheduler.attention: no plug-in 'nope' is installed"),
    ],
)
def test_settings_that_a_start_refuses_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: Path, text: str, words: str
) -> None:
    status, _, err = check(capsys, tmp_path, f"{text}\nmodel.source = '{tiny}'")
    assert status == 2
    assert words in err


@pytest.mark.parametrize(
    ("settings", "wish", "words"),
    [
        ("scheduler.tensor_parallel = 2", {"num_ranks": 2}, "cannot be split among ranks"),
        ("scheduler.attention = 'cpu'", {"attention": "cpu"}, "its architecture has no compiled pass"),
        ("model.quantization = 'int8'", {"quantization": "int8"}, "its architecture has no compiled pass"),
    ],
)
def test_what_a_model_inside_transformers_cannot_do_is_said_in_the_words_of_the_start(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny: Path,
    settings: str,
    wish: dict[str, object],
    words: str,
) -> None:
    become(tiny, architectures=["GPT2LMHeadModel"], model_type="gpt2")
    defaults: dict[str, object] = {"attention": "auto", "quantization": "auto", "dtype": "auto", "device": "cpu"}
    with pytest.raises(BusllmError) as refusal:
        foresee(resolve(str(tiny)), ForwardWish(**(defaults | {"num_ranks": 1} | wish)))  # type: ignore[arg-type]
    status, _, err = check(capsys, tmp_path, f"{settings}\nmodel.source = '{tiny}'")
    assert status == 2
    assert refusal.value.message in err
    assert words in err


def test_a_model_without_positions_is_refused_for_that_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: Path
) -> None:
    sizes = {"hidden_size": 32, "n_head": 2, "n_layer": 1, "vocab_size": 512, "seq_length": 512}
    (tiny / "config.json").write_text(
        json.dumps({"architectures": ["BloomForCausalLM"], "model_type": "bloom", **sizes})
    )
    status, _, err = check(capsys, tmp_path, f"model.source = '{tiny}'")
    assert status == 2
    assert "BloomForCausalLM cannot be served: its layers take no positions" in err


def test_a_model_of_another_kind_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: Path) -> None:
    become(tiny, architectures=["BertForMaskedLM"])
    status, _, err = check(capsys, tmp_path, f"model.source = '{tiny}'")
    assert status == 2
    assert "it fills gaps in a text" in err


def test_an_attention_plug_in_matters_only_where_a_scheduler_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: Path
) -> None:
    elsewhere = (
        f"model.source = '{tiny}'\nscheduler.attention = 'nope'\nbus.url = 'nats://a:4222'\n"
        "[[process]]\nhost = 'other'\nstages = ['frontend', 'tokenizer', 'scheduler', 'detokenizer']\n"
    )
    assert check(capsys, tmp_path, elsewhere)[0] == 0


def test_a_model_is_named_as_it_will_be_served(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: Path) -> None:
    assert f"model      model, {tiny}" in check(capsys, tmp_path, f"model.source = '{tiny}'")[1]
    named = check(capsys, tmp_path, f"model.source = '{tiny}'\nmodel.name = 'mine'")[1]
    assert f"model      mine, {tiny}" in named


def test_pulling_a_model_that_cannot_be_served_says_so(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    become(tiny, architectures=["BertForMaskedLM"])
    assert main(["pull", str(tiny)]) == 2
    assert "it fills gaps in a text" in capsys.readouterr().err
