"""`tokenizer.json` from GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer

from busllm.errors import ModelError
from busllm.model_store.gguf_file import GgufFile
from busllm.model_store.gguf_tokenizer import tokenizer_json
from busllm.model_store.pull import pull


def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json(GgufFile(path))))


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text).tokens


def test_words_are_merged_and_digits_stand_alone(write_gguf):
    assert _pieces(_tokenizer(write_gguf()), "abc ad 12") == ["abc", "Ġa", "d", "Ġ", "1", "2"]


def test_control_tokens_are_special_and_user_defined_ones_are_not(write_gguf):
    tokenizer = _tokenizer(write_gguf())
    ids = tokenizer.encode("<|start|>ab<tool>c<|end|>").ids
    assert ids == [1, 15, 18, 4, 0]
    assert tokenizer.decode(ids) == "ab<tool>c"


def test_llama_3_begins_a_text_with_bos_unless_the_file_says_otherwise(write_gguf):
    assert _pieces(_tokenizer(write_gguf("a.gguf", pre="llama-bpe")), "ab") == ["<|start|>", "ab"]
    path = write_gguf("b.gguf", pre="llama-bpe", extra={"add_add_bos_token": False})
    assert _pieces(_tokenizer(path), "ab") == ["ab"]


def test_an_unknown_way_to_split_is_refused_and_not_guessed(write_gguf):
    with pytest.raises(ModelError, match="'martian'"):
        tokenizer_json(GgufFile(write_gguf(pre="martian")))


def _sentencepiece(path: Path) -> Path:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = {"▁": -20.0, "a": -21.0, "b": -22.0, "c": -23.0, "bc": -1.0, "ab": -2.0, "▁a": -3.0, "abc": -4.0}
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * (3 + 256) + list(pieces.values()))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path):
    tokenizer = _tokenizer(_sentencepiece(tmp_path / "spm.gguf"))
    # "bc" has the best score, so that "ab" is never joined in "abc"; then only "▁a" is left to join.
    assert _pieces(tokenizer, "abc ab") == ["<s>", "▁a", "bc", "▁", "ab"]
    ids = tokenizer.encode("aé").ids
    assert [tokenizer.id_to_token(token_id) for token_id in ids] == ["<s>", "▁a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "aé"


def test_the_default_model_has_the_vocabulary_that_transformers_finds_in_the_file(tmp_path: Path):
    from transformers import AutoTokenizer

    files = pull("smollm2-135m")
    assert files.gguf is not None and files.tokenizer is not None and files.directory is not None
    # A folder with the GGUF alone: beside our own files it would read those.
    (tmp_path / "model.gguf").symlink_to(files.gguf)
    theirs = json.loads(AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf").backend_tokenizer.to_str())
    ours = json.loads(files.tokenizer.read_text())
    assert ours["model"]["vocab"] == theirs["model"]["vocab"]
    assert ours["model"]["merges"] == theirs["model"]["merges"]
    assert ours["decoder"] == theirs["decoder"]
    assert ours["added_tokens"] == theirs["added_tokens"]
    reloaded = AutoTokenizer.from_pretrained(files.directory)
    assert (reloaded.bos_token, reloaded.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_the_default_model_never_learned_two_digits_in_one_token():
    files = pull("smollm2-135m")
    assert files.tokenizer is not None
    tokenizer = Tokenizer.from_file(str(files.tokenizer))
    assert _pieces(tokenizer, "In 1984, x2") == ["In", "Ġ", "1", "9", "8", "4", ",", "Ġx", "2"]
    digits = [token for token in tokenizer.get_vocab() if sum(letter.isdigit() for letter in token) > 1]
    assert digits == []
