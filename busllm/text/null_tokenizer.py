"""The tokenizer of the null model: one id per byte.

Owns: the ids 0 to 255 (bytes of UTF-8) and three special ones, and the simplest chat template there can be.
Does not know: the null engine, which draws the ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from busllm.errors import InvalidRequest
from busllm.model_store.description import NULL_EOS_TOKEN_ID, NULL_VOCAB_SIZE
from busllm.text.byte_stream import ByteStream
from busllm.text.surrogates import utf8
from busllm.text.tokenizer import Message, StreamDecoder

_NUM_BYTES = 256
SPECIAL_TEXTS: Mapping[int, str] = MappingProxyType(
    {NULL_EOS_TOKEN_ID: "<|eos|>", NULL_EOS_TOKEN_ID + 1: "<|turn|>", NULL_EOS_TOKEN_ID + 2: "<|end|>"}
)


class NullTokenizer:
    """`Tokenizer` of the null model."""

    @property
    def vocab_size(self) -> int:
        return NULL_VOCAB_SIZE

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(SPECIAL_TEXTS)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [_encode(text, "prompt") for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        bytes_of = _text_bytes if skip_special_tokens else _all_bytes
        return b"".join(map(bytes_of, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return _all_bytes(token_id)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        turns = [f"<|{message.get('role')}|>{_text_of(message)}" for message in messages]
        return "".join(turns) + ("<|assistant|>" if add_generation_prompt else "")

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        return _encode(self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt), "messages")

    def stream(self, prompt_tail_ids: Sequence[int], skip_special_tokens: bool) -> StreamDecoder:
        return ByteStream(_text_bytes if skip_special_tokens else _all_bytes, prompt_tail_ids)


def _encode(text: str, param: str) -> list[int]:
    return list(utf8(text, param))


def _text_of(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise InvalidRequest("The null model's chat template takes only text as content.", param="messages")
    return content


def _text_bytes(token_id: int) -> bytes:
    return bytes((token_id,)) if 0 <= token_id < _NUM_BYTES else b""


def _all_bytes(token_id: int) -> bytes:
    return _text_bytes(token_id) or SPECIAL_TEXTS.get(token_id, "").encode()
