"""`Tokenizer` on Hugging Face's `tokenizers`.

Owns: encoding, decoding and the bytes of single tokens of any `tokenizer.json`.
Does not know: chat templates beyond calling one (`chat_template.py`), stop strings (`decoder.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from busllm.errors import InvalidRequest, ModelError
from busllm.model_store.files import ModelFiles, read_json
from busllm.text.byte_stream import ByteStream
from busllm.text.chat_template import ChatTemplate, load_chat_template, special_token
from busllm.text.surrogates import utf8
from busllm.text.tokenizer import Message, StreamDecoder
from busllm.text.window_stream import WindowStream

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_METASPACE = "\u2581"


class HuggingFaceTokenizer:
    """A model's tokenizer.

    Args:
        tokenizer: the library's tokenizer; its truncation and padding are switched off.
        chat_template: None for a model that was not trained to chat.
        bos_id: the token that begins a text, if the model has one.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None = None,
        bos_id: int | None = None,
    ) -> None:
        # A file may carry the truncation that its training used; prompts are refused, never cut.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._bos_id = bos_id
        added = tokenizer.get_added_tokens_decoder()
        self._vocab_size = max(tokenizer.get_vocab_size(), 1 + max(added, default=-1))
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_values = _byte_level_alphabet() if _is_byte_level(tokenizer) else None
        # Filled as tokens are met: a vocabulary has more of them than most processes ever see.
        self._bytes_by_id: dict[int, bytes] = {}

    @classmethod
    def load(cls, files: ModelFiles) -> HuggingFaceTokenizer:
        """Loads a model's tokenizer.

        Raises:
            ModelError: no `tokenizer.json`, or it is damaged.
        """
        if files.tokenizer is None:
            raise ModelError(f"The model {files.name!r} has no tokenizer.json.")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(files.tokenizer))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{files.tokenizer} is not a tokenizer: {error}") from error
        config = read_json(files.tokenizer_config) if files.tokenizer_config else {}
        bos = special_token(config, "bos_token")
        return cls(tokenizer, load_chat_template(files), None if bos is None else tokenizer.token_to_id(bos))

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return self._encode(texts, add_special_tokens, param="prompt")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        token_bytes = self._bytes_by_id.get(token_id)
        if token_bytes is None:
            token_bytes = self._bytes_by_id[token_id] = self._find_bytes(token_id)
        return token_bytes

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        if self._chat_template is None:
            raise InvalidRequest(
                "This model has no chat template: it was not trained to chat. Use /v1/completions.", param="messages"
            )
        return self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=kwargs
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs)
        (ids,) = self._encode([text], False, param="messages")
        return ids

    def stream(self, prompt_tail_ids: Sequence[int], skip_special_tokens: bool) -> StreamDecoder:
        if self._byte_values is None:
            return WindowStream(self._tokenizer, prompt_tail_ids, skip_special_tokens)
        return ByteStream(self._text_bytes if skip_special_tokens else self.token_bytes, prompt_tail_ids)

    def _text_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_values is not None:
            # An added token may have letters outside the alphabet; the library then takes it as it is written.
            values = [self._byte_values.get(letter) for letter in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace(_METASPACE, " ").encode()

    def _encode(self, texts: Sequence[str], add_special_tokens: bool, *, param: str) -> list[list[int]]:
        for text in texts:
            utf8(text, param)
        # The fast variant leaves out character offsets, which nobody asks for; it runs without the interpreter lock.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        ids = [encoding.ids for encoding in encodings]
        bos = self._bos_id
        if not add_special_tokens or bos is None:
            return ids
        return [row[1:] if row[:2] == [bos, bos] else row for row in ids]


def _is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    return isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel)


def _byte_level_alphabet() -> dict[str, int]:
    """Letter → byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes follow from U+0100.

    The order is GPT-2's (openai/gpt-2, encoder.py, bytes_to_unicode).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}
