"""`tokenizer.json` of a GGUF file, from its vocabulary.

Owns: how a GGUF's tokens, merges, scores, token types and pre-tokenizer name become the tokenizer that the model was
trained with: byte-level BPE ("gpt2") and sentencepiece BPE ("llama").
Does not know: how the file is used (`busllm/text`), that there are weights.
Next on the path: `derive.py` writes the file.
"""

from __future__ import annotations

from typing import Any

from busllm.errors import ModelError
from busllm.model_store.config_values import ConfigValues
from busllm.model_store.gguf_file import GgufFile
from busllm.model_store.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"  # sentencepiece's visible blank


def tokenizer_json(file: GgufFile) -> dict[str, Any]:
    """Makes the content of `tokenizer.json`.

    Raises:
        ModelError: no vocabulary, or a kind that is not known (a guess would give wrong ids without a word).
    """
    metadata = file.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{file.path} has no vocabulary.")
    kind = metadata.get("tokenizer.ggml.model")
    match kind:
        case "gpt2":
            pre = _pre_tokenizer(file)
            parts, adds_bos = _byte_level(metadata, tokens, pre), pre.adds_bos
        case "llama":
            parts, adds_bos = _sentencepiece(file, tokens), True
        case _:
            raise ModelError(f"{file.path} has a vocabulary of kind {kind!r}; 'gpt2' and 'llama' can be read.")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, tokens, adds_bos),
        "decoder": None,
    } | parts


def tokenizer_config(file: GgufFile, max_context_tokens: int) -> dict[str, Any]:
    """Makes the content of `tokenizer_config.json`: the names of the special tokens."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context_tokens,
    }
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for gguf_name, name in names.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{gguf_name}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    return config


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(
            f"{file.path} splits text by {name!r}, which is not known ({known}). Put the model's tokenizer.json and "
            "config.json into one folder with the file and name the folder as the model."
        )
    return PRE_TOKENIZERS[name]


def _added_tokens(metadata: dict[str, Any], tokens: list[str]) -> list[dict[str, Any]]:
    """Tokens that are found in the text before anything else splits it; control tokens are special."""
    types = metadata.get("tokenizer.ggml.token_type", [])
    special_types = (_CONTROL, _UNKNOWN) if metadata.get("tokenizer.ggml.model") == "llama" else (_CONTROL,)
    return [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special_types,
        }
        for token_id, kind in enumerate(types[: len(tokens)])
        if kind in special_types or kind == _USER_DEFINED
    ]


def _post_processor(metadata: dict[str, Any], tokens: list[str], adds_bos: bool) -> dict[str, Any] | None:
    """Puts BOS before and EOS after a text, where the model was trained so."""
    before = _token_id(metadata, "bos_token_id", tokens) if _says(metadata, "add_bos_token", adds_bos) else None
    after = _token_id(metadata, "eos_token_id", tokens) if _says(metadata, "add_eos_token", False) else None
    if before is None and after is None:
        return None
    ids = {tokens[token_id]: token_id for token_id in (before, after) if token_id is not None}

    def template(sequence: str, type_id: int) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        if before is not None:
            pieces.insert(0, {"SpecialToken": {"id": tokens[before], "type_id": type_id}})
        if after is not None:
            pieces.append({"SpecialToken": {"id": tokens[after], "type_id": type_id}})
        return pieces

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": template("A", 0) + template("B", 1),
        "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]} for text, number in ids.items()},
    }


def _token_id(metadata: dict[str, Any], name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}"
    if metadata.get(key) is None:
        return None
    return ConfigValues(metadata, "The GGUF file").whole(key, at_least=0, at_most=len(tokens) - 1)


def _says(metadata: dict[str, Any], key: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{key}", default))


def _bpe(vocab: list[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: token_id for token_id, token in enumerate(vocab)},
        "merges": merges,
    } | options


def _byte_level(metadata: dict[str, Any], tokens: list[str], pre: PreTokenizer) -> dict[str, Any]:
    # Byte-level tokens have no blank in them (it is written as another letter), so one blank parts a pair.
    merges = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges", [])]
    return {
        "normalizer": {"type": "NFC"} if pre.normalizes_nfc else None,
        "pre_tokenizer": pre.json(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(tokens, merges, ignore_merges=pre.ignores_merges),
    }


def _sentencepiece(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    metadata = file.metadata
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{file.path} has a sentencepiece vocabulary without scores.")
    prefixes_space = _says(metadata, "add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefixes_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixes_space else []
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe(
            tokens,
            _merges_from_scores(tokens, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _merges_from_scores(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Every way to join two tokens into a third, in the order in which sentencepiece's BPE joins them.

    Sentencepiece joins the pair whose result has the highest score first; a BPE model with ranked merges does the same
    when its merges are sorted so. Pairs with the same result are in the order of their parts' ids.
    """
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right], left, right))
    return [[left, right] for _, _, _, left, right in sorted(merges)]
