"""Tokenizers of the three families: byte-level (the default model's), byte fallback, and metaspace without bytes."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from busllm.model_store.pull import pull
from busllm.text.huggingface_tokenizer import HuggingFaceTokenizer
from busllm.text.null_tokenizer import NullTokenizer
from busllm.text.tokenizer import Tokenizer, load_tokenizer

WORDS = ["▁", "▁the", "▁a", "▁blå", "bær", "hello", "▁hello", "o", "▁漢", "字", ".", ",", "▁,", "\n", "żół", "ć", "▁▁"]


def make_byte_fallback() -> HuggingFaceTokenizer:
    """As Llama 2 and Mistral have it: sentencepiece with bytes for what has no token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, *"abcdefgh"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return HuggingFaceTokenizer(tokenizer)


def make_metaspace() -> HuggingFaceTokenizer:
    """As unigram models have it: a visible blank before each word."""
    tokens = ["<unk>", *WORDS, *"abcdefgh"]
    tokenizer = tokenizers.Tokenizer(models.Unigram([(token, -float(index)) for index, token in enumerate(tokens)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<unk>", normalized=False)])
    return HuggingFaceTokenizer(tokenizer)


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    return load_tokenizer(pull("smollm2-135m"))


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    return make_byte_fallback()


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    return make_metaspace()


@pytest.fixture(scope="session", params=["smollm", "byte_fallback", "metaspace", "null"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return NullTokenizer() if request.param == "null" else request.getfixturevalue(request.param)
