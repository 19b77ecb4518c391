"""Text to ids and back, and single tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, processors

from busllm.errors import InvalidRequest, ModelError
from busllm.model_store.files import ModelFiles
from busllm.model_store.resolve import resolve
from busllm.text.chat_template import ChatTemplate
from busllm.text.huggingface_tokenizer import HuggingFaceTokenizer
from busllm.text.null_tokenizer import NullTokenizer
from busllm.text.tokenizer import Tokenizer, load_tokenizer

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def test_a_chat_of_the_default_model_has_the_ids_of_its_turns(smollm: Tokenizer):
    text = smollm.apply_chat_template(CHAT)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm.encode_chat(CHAT)
    assert ids == smollm.encode_batch([text], False)[0]
    assert ids.count(1) == 3 and ids.count(2) == 2
    assert smollm.decode(ids, False) == text
    assert {1, 2} <= smollm.special_ids
    assert smollm.vocab_size == 49152


def test_the_bytes_of_single_tokens_join_to_the_text(tokenizer: Tokenizer):
    text = "a the blåbær, 漢字"
    ids = tokenizer.encode_batch([text], False)[0]
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode()
    assert joined.removeprefix(" ") == tokenizer.decode(ids, False).removeprefix(" ")


def test_ids_outside_the_vocabulary_give_no_text(tokenizer: Tokenizer):
    assert tokenizer.decode([tokenizer.vocab_size + 5], False) == ""
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_lone_surrogates_are_the_clients_error(tokenizer: Tokenizer):
    with pytest.raises(InvalidRequest, match="lone surrogate") as caught:
        tokenizer.encode_batch(["fine", "a\ud800b"], False)
    assert caught.value.param == "prompt"


def test_lone_surrogates_in_a_chat_are_found_too(smollm: Tokenizer):
    for tokenizer in (smollm, NullTokenizer()):
        with pytest.raises(InvalidRequest, match="lone surrogate") as caught:
            tokenizer.encode_chat([{"role": "user", "content": "\udfff"}])
        assert caught.value.param == "messages"


def test_a_model_without_a_template_says_so(metaspace: Tokenizer):
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        metaspace.encode_chat(CHAT)
    assert caught.value.param == "messages"


def test_empty_texts_have_no_tokens(smollm: Tokenizer):
    assert smollm.encode_batch(["", "a", ""], True) == [[], smollm.encode_batch(["a"], False)[0], []]
    assert smollm.encode_batch([], True) == []


def _with_bos() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE({"<s>": 0, "a": 1, "b": 2}, []))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def test_bos_is_never_there_twice():
    template = ChatTemplate({"default": "{{ bos_token }}a"}, {"bos_token": "<s>"})
    tokenizer = HuggingFaceTokenizer(_with_bos(), template, bos_id=0)
    assert tokenizer.encode_chat(CHAT) == [0, 1]
    assert tokenizer.encode_batch(["a", "<s>a", ""], True) == [[0, 1], [0, 1], [0]]
    assert tokenizer.encode_batch(["a", "<s>a"], False) == [[1], [0, 1]]


def test_truncation_in_the_file_does_not_cut_prompts():
    inner = _with_bos()
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    assert HuggingFaceTokenizer(inner).encode_batch(["abab"], False) == [[1, 2, 1, 2]]


def test_a_model_without_a_tokenizer_and_a_damaged_one_are_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(ModelFiles(name="x", directory=tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a tokenizer"):
        load_tokenizer(ModelFiles(name="x", directory=tmp_path, tokenizer=tmp_path / "tokenizer.json"))


def test_the_null_tokenizer_is_bytes():
    null = load_tokenizer(resolve("null"))
    assert null.encode_batch(["aé"], True) == [[97, 0xC3, 0xA9]]
    assert null.decode([97, 256, 0xC3, 0xA9, 0xC3], True) == "aé\N{REPLACEMENT CHARACTER}"
    assert null.decode([257, 97, 258, 256], False) == "<|turn|>a<|end|><|eos|>"
    assert null.vocab_size == 259
    assert null.special_ids == {256, 257, 258}
    assert null.apply_chat_template(CHAT) == "<|user|>What is the capital of France?<|assistant|>"


def test_the_null_template_takes_only_text():
    with pytest.raises(InvalidRequest):
        NullTokenizer().encode_chat([{"role": "user", "content": None}])
