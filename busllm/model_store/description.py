"""What stages without an engine know about a model.

Owns: `ModelDescription`: the context length, the vocabulary's size, the tokens that end a turn, and a fingerprint by
which stages of different models or versions of one are told apart.
Does not know: torch, what is in the weights (`content_digest.py` says whether it is the same), how text becomes ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from busllm.errors import ModelError
from busllm.model_store.config_values import ConfigValues
from busllm.model_store.content_digest import content_digest
from busllm.model_store.files import ModelFiles, read_json
from busllm.model_store.refusals import refuse_other_kinds

NULL_VOCAB_SIZE = 256 + 3
NULL_MAX_CONTEXT_TOKENS = 1_000_000
NULL_EOS_TOKEN_ID = 256

_CONTEXT_KEYS = (  # the first is what most write; the others stand in older configurations
    *("max_position_embeddings", "n_positions", "n_ctx"),
    *("seq_length", "max_seq_len", "max_seq_length", "max_sequence_length"),
)


class ModelDescription(msgspec.Struct, frozen=True):
    """Facts about a model.

    Attributes:
        name: the name under which it is served.
        max_context_tokens: prompt and answer together, where positions are rotated alike for all lengths.
        vocab_size: number of logits (the tokenizer's vocabulary may be smaller).
        eos_token_ids: every token that ends a turn.
        has_chat_template: whether chats can be served.
        fingerprint: hex digest that differs when configuration, tokenizer or any byte of the weights differs.
    """

    name: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    fingerprint: str


def describe(files: ModelFiles) -> ModelDescription:
    """Describes a model from its small files, and from the weights' digest.

    Raises:
        ModelError: see `check_small_files`; or the weights cannot be read.
    """
    return _described(files, fingerprint)


def check_small_files(files: ModelFiles) -> None:
    """Refuses what `describe` would, without a look at the weights.

    Raises:
        ModelError: no configuration, one of another kind of model, or one that does not say what is needed.
    """
    _described(files, lambda _: "")


def _described(files: ModelFiles, digest: Callable[[ModelFiles], str]) -> ModelDescription:
    if files.is_null:
        return ModelDescription(
            name=files.name,
            max_context_tokens=NULL_MAX_CONTEXT_TOKENS,
            vocab_size=NULL_VOCAB_SIZE,
            eos_token_ids=(NULL_EOS_TOKEN_ID,),
            has_chat_template=True,
            fingerprint=hashlib.sha256(b"null").hexdigest()[:32],
        )
    if files.config is None:
        raise ModelError(f"The model {files.name!r} has no config.json.")
    config = text_config(read_json(files.config))
    refuse_other_kinds(config)
    vocab_size = _positive(config, ("vocab_size",), files.config)
    eos_token_ids = _token_ids(config, "eos_token_id", vocab_size, files.config)
    if files.generation_config is not None:
        generation = read_json(files.generation_config)
        eos_token_ids = _token_ids(generation, "eos_token_id", vocab_size, files.generation_config) + eos_token_ids
    return ModelDescription(
        name=files.name,
        max_context_tokens=_max_context_tokens(config, files.config),
        vocab_size=vocab_size,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        has_chat_template=_has_chat_template(files),
        fingerprint=digest(files),
    )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that describes the language model: models of several kinds of input nest it."""
    nested = config.get("text_config")
    return config | nested if isinstance(nested, dict) else config


def fingerprint(files: ModelFiles) -> str:
    """A digest of configuration, tokenizer, chat template and all bytes of the weights.

    Large weight files are read when they are new to this machine or have changed; later calls take milliseconds.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.sha256()
    small = (files.config, files.generation_config, files.tokenizer, files.tokenizer_config, files.chat_template)
    try:
        for path in small:
            content = path.read_bytes() if path is not None else b""
            digest.update(len(content).to_bytes(8, "little") + content)
        for path in files.weights:
            digest.update(content_digest(path).encode())
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}.") from error
    return digest.hexdigest()[:32]


def _max_context_tokens(config: dict[str, Any], path: Path) -> int:
    """What the model declares; with LongRoPE only what it was pre-trained with.

    Beyond that the whole sequence is rotated by other factors, also the keys that are in the cache already.
    """
    declared = _positive(config, _CONTEXT_KEYS, path)
    values = ConfigValues(config, str(path))
    rope = values.section_or_none("rope_parameters") or values.section_or_none("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return declared
    key = "original_max_position_embeddings"
    original = values.whole_or_none(key) or ConfigValues(rope, str(path)).whole_or_none(key)
    return min(declared, original or declared)


def _positive(config: dict[str, Any], keys: tuple[str, ...], path: Path) -> int:
    """The first of several keys that is there."""
    for key in keys:
        if config.get(key) is not None:
            return ConfigValues(config, str(path)).whole(key)
    raise ModelError(f"{path} does not say {' or '.join(keys)}.")


def _token_ids(settings: dict[str, Any], key: str, vocab_size: int, path: Path) -> tuple[int, ...]:
    """The ids of an entry that is one id, a list of them or absent.

    Raises:
        ModelError: an entry that is no token of the model; a step that gives it a meaning would fail.
    """
    value = settings.get(key)
    token_ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:  # `true` is an int to isinstance
            raise ModelError(f"{path} has {token_id!r} in {key}; the model's tokens are 0 to {vocab_size - 1}.")
    return tuple(token_ids)


def _has_chat_template(files: ModelFiles) -> bool:
    if files.chat_template is not None:
        return True
    return files.tokenizer_config is not None and bool(read_json(files.tokenizer_config).get("chat_template"))
