"""From prompts to checked token ids: the part of a tokenizer that runs in a thread.

Owns: the forms of a prompt, the checks of what comes out, and the questions of `/tokenize` and `/detokenize`.
Does not know: the bus. Called from worker threads.
Next on the path: `tokenizer.py` hands the ids on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

import msgspec
import numpy as np

from busllm.errors import BusllmError, ContextLengthExceeded, InvalidRequest
from busllm.grammar.compiler import GrammarCompiler
from busllm.messages.codec import pack_ids, unpack_ids
from busllm.messages.to_tokenizer import ChatPrompt, Prompt, TextPrompt, Tokenize, TokenPrompt
from busllm.telemetry.logging import get_logger
from busllm.text.tokenizer import Tokenizer

_log = get_logger("busllm.stages.tokenizer", stage="tokenizer")
TAKEN_TEMPLATE_OPTIONS = frozenset({"messages", "tools", "add_special_tokens"})

Outcome = tuple[bytes, ...] | BusllmError


class TokenizeQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """Question of `control.<tokenizer>.tokenize`: one of `prompt` and `messages`."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    template_options: dict[str, Any] = {}


class DetokenizeQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """Question of `control.<tokenizer>.detokenize`."""

    token_ids: list[int]
    skip_special_tokens: bool = False


class PromptEncoder:
    """Encodes for one model.

    Args:
        tokenizer: the model's.
        grammars: compiles what a request's grammar needs, so that a wrong one is refused here.
        max_context_tokens, vocab_size: of the model.
    """

    def __init__(
        self, tokenizer: Tokenizer, grammars: GrammarCompiler, max_context_tokens: int, vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size

    def encode(self, request: Tokenize) -> Outcome:
        """The packed ids of every prompt of a request, or why there are none: a failure is one request's own."""
        try:
            if request.params.grammar is not None:
                self._grammars.compiled(request.params.grammar)
            return tuple(pack_ids(self._encode(prompt)) for prompt in request.prompts)
        except BusllmError as error:
            return error
        except Exception:  # noqa: BLE001 - the stage boundary: one request's fault must not be that of all
            _log.exception("tokenizing_failed", uid=request.uid)
            return BusllmError("The prompt could not be tokenized.")

    def _encode(self, prompt: Prompt) -> np.ndarray:
        match prompt:
            case ChatPrompt():
                return self._checked(
                    self._encode_chat(prompt.messages, prompt.tools, prompt.template_options), "messages"
                )
            case TextPrompt():
                return self._checked(self._tokenizer.encode_batch([prompt.text], add_special_tokens=True)[0], "prompt")
            case TokenPrompt():
                return self._checked(unpack_ids(prompt.token_ids).tolist(), "prompt")
            case _:
                assert_never(prompt)

    def _encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        taken = TAKEN_TEMPLATE_OPTIONS.intersection(options)
        if taken:
            raise InvalidRequest(
                f"chat_template_kwargs has {min(taken)!r}, which is a field of its own.",
                param="chat_template_kwargs",
            )
        return self._tokenizer.encode_chat(messages, tools=tools, **options)

    def _checked(self, token_ids: list[int], param: str) -> np.ndarray:
        ids = np.asarray(token_ids, dtype=np.int32)
        if not len(ids):
            raise InvalidRequest(f"{param} is empty: there is no token to begin with.", param=param)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise InvalidRequest(f"{param} has token ids outside 0 to {self._vocab_size - 1}.", param=param)
        if len(ids) >= self._max_context_tokens:
            raise ContextLengthExceeded(len(ids), self._max_context_tokens, param)
        return ids

    def answer_tokenize(self, asked: TokenizeQuestion) -> list[int]:
        """The ids of a text or of a chat.

        Raises:
            InvalidRequest: the text, the messages or the template's variables are wrong.
        """
        if asked.messages is not None:
            return self._encode_chat(asked.messages, None, asked.template_options)
        return self._tokenizer.encode_batch([asked.prompt or ""], add_special_tokens=asked.add_special_tokens)[0]

    def answer_detokenize(self, asked: DetokenizeQuestion) -> str:
        """The text of ids.

        Raises:
            InvalidRequest: an id is outside the vocabulary.
        """
        if any(not 0 <= token_id < self._vocab_size for token_id in asked.token_ids):
            raise InvalidRequest(f"tokens has ids outside 0 to {self._vocab_size - 1}.", param="tokens")
        return self._tokenizer.decode(asked.token_ids, skip_special_tokens=asked.skip_special_tokens)
