"""The protocol between text and token ids.

Owns: `Tokenizer`, `StreamDecoder` and the choice of the implementation for a model.
Does not know: how an implementation works (`huggingface_tokenizer.py`, `null_tokenizer.py`).
Next on the path: ids go to the engine; `decoder.py` makes text of what comes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from busllm.model_store.files import ModelFiles

Message = Mapping[str, Any]


class StreamDecoder(Protocol):
    """Decodes the ids of one sequence as they come."""

    def step(self, token_id: int) -> str:
        """Takes the next id; returns the text that is certain now. Bytes of an incomplete character wait."""
        ...

    def flush(self) -> str:
        """Ends the sequence; returns what waited, incomplete characters as U+FFFD, as a whole decode gives them."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back, for one model. Methods may be called from several threads."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are not text: `decode` leaves them out when asked to."""
        ...

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Encodes texts, each alone.

        Args:
            add_special_tokens: put BOS (and what else the model wants) around each text. A text that brings its own
                BOS gets no second one.

        Raises:
            InvalidRequest: a text has lone surrogates, which no encoding can express.
        """
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decodes ids; what is not valid UTF-8 becomes U+FFFD. Ids outside the vocabulary give no text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for: a part of a character, where `decode` could only give U+FFFD."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Renders a chat as the model was trained to read it.

        Args:
            messages: OpenAI's messages.
            add_generation_prompt: end with the beginning of the assistant's turn.
            tools: OpenAI's tool definitions.
            **kwargs: variables that the template may know.

        Raises:
            InvalidRequest: no template, or the template refused the messages; `param` is "messages".
        """
        ...

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Renders a chat and encodes it. The template writes BOS where there is one: none is added.

        Raises:
            InvalidRequest: as `apply_chat_template`, or lone surrogates.
        """
        ...

    def stream(self, prompt_tail_ids: Sequence[int], skip_special_tokens: bool) -> StreamDecoder:
        """Begins to decode a sequence that continues a prompt.

        Args:
            prompt_tail_ids: the last ids of the prompt; a few are enough. They never appear in the text, but they
                decide whether a blank stands before the first word.
        """
        ...


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Loads a model's tokenizer.

    Raises:
        ModelError: the model has none, or its file is damaged.
    """
    # Imported here, so that a process without a model does not load the library.
    if files.is_null:
        from busllm.text.null_tokenizer import NullTokenizer

        return NullTokenizer()
    from busllm.text.huggingface_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer.load(files)
