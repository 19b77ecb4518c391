"""What stages without an engine know about a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from busllm.errors import ModelError
from busllm.model_store.description import describe
from busllm.model_store.files import ModelFiles
from busllm.model_store.pull import pull
from busllm.model_store.resolve import resolve

CONFIG = {"max_position_embeddings": 128, "vocab_size": 10, "eos_token_id": 2}


def _files(folder: Path, config: dict[str, Any], **more: dict[str, Any]) -> ModelFiles:
    paths: dict[str, Path] = {}
    for name, value in {"config": config, **more}.items():
        paths[name] = folder / f"{name}.json"
        paths[name].write_text(json.dumps(value))
    return ModelFiles(name="x", directory=folder, **paths)


def test_the_default_model_is_described_from_its_small_files():
    description = describe(pull("smollm2-135m"))
    assert description.name == "smollm2-135m"
    assert description.max_context_tokens == 8192
    assert description.vocab_size == 49152
    assert description.eos_token_ids == (2,)
    assert description.has_chat_template


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["ViTForImageClassification"]}, "it classifies images"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "it has an encoder"),
        ({"architectures": ["LlamaModel"]}, "it gives embeddings and no next token"),
    ],
)
def test_another_kind_of_model_is_refused_by_what_it_is_and_not_by_what_it_lacks(tmp_path: Path, config, reason):
    with pytest.raises(ModelError, match=f"cannot be served: {reason}"):
        describe(_files(tmp_path, config))


def test_a_model_with_a_head_is_described_though_its_name_ends_in_model(tmp_path: Path):
    assert describe(_files(tmp_path, CONFIG | {"architectures": ["GPT2LMHeadModel"]})).vocab_size == 10


def test_the_null_model_is_described():
    description = describe(resolve("null"))
    assert (description.vocab_size, description.max_context_tokens, description.eos_token_ids) == (
        259,
        1_000_000,
        (256,),
    )


def test_all_end_of_turn_tokens_of_both_files_count_once(tmp_path: Path):
    files = _files(tmp_path, CONFIG, generation_config={"eos_token_id": [5, 2, 7]})
    assert describe(files).eos_token_ids == (5, 2, 7)
    files = _files(tmp_path, CONFIG, generation_config={"eos_token_id": 5})
    assert describe(files).eos_token_ids == (5, 2)
    assert describe(_files(tmp_path, CONFIG)).eos_token_ids == (2,)


@pytest.mark.parametrize("token_ids", [[3, 10], 10, -1, "5", 5.5, [3, None], True, [[3]], {"id": 3}])
@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_an_end_of_turn_that_is_no_token_of_the_model_is_refused_by_file_and_key(
    tmp_path: Path, name: str, token_ids: object
) -> None:
    entry = {"eos_token_id": token_ids}
    config = CONFIG | entry if name == "config" else CONFIG
    files = _files(tmp_path, config, **({"generation_config": entry} if name == "generation_config" else {}))
    with pytest.raises(ModelError, match=rf"/{name}\.json has .* in eos_token_id; the model's tokens are 0 to 9\.$"):
        describe(files)


@pytest.mark.parametrize("token_ids", [None, []])
def test_a_model_may_have_no_end_of_turn(tmp_path: Path, token_ids: object) -> None:
    assert describe(_files(tmp_path, CONFIG | {"eos_token_id": token_ids})).eos_token_ids == ()


def test_a_chat_template_may_stand_in_the_tokenizer_configuration(tmp_path: Path):
    assert not describe(_files(tmp_path, CONFIG, tokenizer_config={})).has_chat_template
    assert describe(_files(tmp_path, CONFIG, tokenizer_config={"chat_template": "x"})).has_chat_template


def test_a_nested_text_configuration_is_read(tmp_path: Path):
    nested = {"text_config": CONFIG, "vocab_size": 99}
    assert describe(_files(tmp_path, nested)).vocab_size == 10


@pytest.mark.parametrize("key", ["max_position_embeddings", "vocab_size"])
def test_a_configuration_that_does_not_say_enough_is_refused(tmp_path: Path, key: str):
    config = {name: value for name, value in CONFIG.items() if name != key}
    with pytest.raises(ModelError, match=key):
        describe(_files(tmp_path, config))


def test_a_damaged_configuration_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        describe(ModelFiles(name="x", directory=tmp_path, config=tmp_path / "config.json"))


def test_the_fingerprint_differs_with_configuration_tokenizer_and_weights(tmp_path: Path):
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"one")

    def print_of(config: dict[str, Any], tokenizer: dict[str, Any]) -> str:
        files = _files(tmp_path, config, tokenizer=tokenizer)
        return describe(
            ModelFiles(**{**{f: getattr(files, f) for f in files.__struct_fields__}, "gguf": weights})
        ).fingerprint

    prints = [print_of(CONFIG, {}), print_of(CONFIG | {"rope_theta": 1}, {}), print_of(CONFIG, {"a": 1})]
    assert print_of(CONFIG, {}) == prints[0]
    weights.write_bytes(b"two")
    prints.append(print_of(CONFIG, {}))
    assert len(set(prints)) == 4


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_the_fingerprint_differs_between_weights_of_one_size_that_begin_alike(tmp_path: Path, kind: str):
    def print_of(name: str, last: bytes) -> str:
        weights = tmp_path / name
        weights.write_bytes(bytes(300_000) + last)
        files = msgspec.structs.replace(_files(tmp_path, CONFIG), **{kind: weights if kind == "gguf" else (weights,)})
        return describe(files).fingerprint

    assert print_of("one", b"1") == print_of("a copy", b"1")
    assert print_of("one", b"1") != print_of("a fine-tune", b"2")


def test_weights_that_cannot_be_read_are_named(tmp_path: Path):
    files = msgspec.structs.replace(_files(tmp_path, CONFIG), gguf=tmp_path / "gone.gguf")
    with pytest.raises(ModelError, match=r"gone\.gguf cannot be read"):
        describe(files)


def test_finding_and_describing_a_model_imports_no_heavy_package():
    code = """
import sys
from busllm.model_store.resolve import resolve
from busllm.model_store.description import describe
from busllm.text.tokenizer import load_tokenizer
import busllm.text.huggingface_tokenizer, busllm.text.decoder
files = resolve("null")
describe(files), load_tokenizer(files)
print([name for name in ("torch", "transformers", "numpy", "gguf", "huggingface_hub") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
