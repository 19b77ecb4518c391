"""Chunks of streams as bytes.

Owns: the events of a chat and of a completions stream. A chunk is put together from parts that were encoded once per
choice; only the text (and log probabilities) of each delta is encoded again.
Does not know: in which order chunks come (`generation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from busllm.messages.to_frontend import TokenText
from busllm.requests.generation import ChoiceDelta
from busllm.stages.frontend.answers import ChatLogprobs, UsageBody
from busllm.stages.frontend.logprobs import chat_tokens, completion_logprobs

_encode = msgspec.json.Encoder().encode
_PLACE = b"\0"  # stands for a text; JSON has no such byte


class Head(msgspec.Struct, frozen=True):
    """What all chunks of one stream have in common.

    Attributes:
        id, created, model: constant.
        with_usage: the last chunk has token counts, and the others say `"usage":null`.
    """

    id: str
    created: int
    model: str
    with_usage: bool

    def event(self, kind: str) -> bytes:
        """The beginning of each event, up to the list of choices."""
        return (
            b'data: {"id":' + _encode(self.id) + b',"object":' + _encode(kind) + b',"created":' + _encode(self.created)
            + b',"model":' + _encode(self.model) + b',"choices":['
        )  # fmt: skip

    @property
    def tail(self) -> bytes:
        """The end of each event, from the end of the list of choices."""
        return b'],"usage":null}\n\n' if self.with_usage else b"]}\n\n"


class Chunks(Protocol):
    """Writes the events of one stream."""

    def opening(self, delta: ChoiceDelta) -> bytes:
        """What comes before the first text of a choice; may be empty."""
        ...

    def text(self, delta: ChoiceDelta) -> bytes:
        """New text of a choice."""
        ...

    def closing(self, choice: int, finish_reason: str) -> bytes:
        """The last event of a choice."""
        ...

    def usage(self, usage: UsageBody) -> bytes:
        """The event with token counts, which has no choice."""
        ...


class PlainText:
    """Events with nothing but text: what stands around it is put together once per choice.

    Args:
        whole: the whole event of a choice around encoded text.
    """

    def __init__(self, whole: Callable[[int, bytes], bytes]) -> None:
        self._whole = whole
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, delta: ChoiceDelta) -> bytes:
        """The event of new text."""
        around = self._around.get(delta.choice)
        if around is None:
            before, _, after = self._whole(delta.choice, _PLACE).partition(_PLACE)
            around = self._around[delta.choice] = (before, after)
        return around[0] + _encode(delta.text) + around[1]


class ChatChunks:
    """Events of `POST /v1/chat/completions`."""

    def __init__(self, head: Head) -> None:
        self._start = head.event("chat.completion.chunk")
        self._tail = head.tail
        self._plain = PlainText(
            lambda choice, text: self._chunk(choice, b'{"content":' + text + b"}", b"null", b"null")
        )

    def opening(self, delta: ChoiceDelta) -> bytes:
        """The role."""
        return self._chunk(delta.choice, b'{"role":"assistant","content":""}', b"null", b"null")

    def text(self, delta: ChoiceDelta) -> bytes:
        """New text, with log probabilities where the delta has some."""
        if not delta.logprobs:
            return self._plain.event(delta)
        logprobs = _encode(ChatLogprobs(chat_tokens(delta.logprobs)))
        return self._chunk(delta.choice, b'{"content":' + _encode(delta.text) + b"}", logprobs, b"null")

    def closing(self, choice: int, finish_reason: str) -> bytes:
        """The reason of the end."""
        return self._chunk(choice, b"{}", b"null", _encode(finish_reason))

    def usage(self, usage: UsageBody) -> bytes:
        """Token counts."""
        return self._start + b'],"usage":' + _encode(usage) + b"}\n\n"

    def _chunk(self, choice: int, delta: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
        return (
            b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b'
            % (self._start, choice, delta, logprobs, finish_reason, self._tail)
        )  # fmt: skip


class CompletionChunks:
    """Events of `POST /v1/completions`.

    Args:
        head: see `Head`.
        echoes: the text of each prompt, for `echo`; None = no echo.
        n: choices per prompt.
        num_top: alternatives per token.
    """

    def __init__(self, head: Head, echoes: Sequence[str] | None, n: int, num_top: int) -> None:
        self._start = head.event("text_completion")
        self._tail = head.tail
        self._echoes = echoes
        self._n = n
        self._num_top = num_top
        self._offsets: dict[int, int] = {}
        self._plain = PlainText(lambda choice, text: self._chunk(choice, text, b"null", b"null"))

    def opening(self, delta: ChoiceDelta) -> bytes:
        """The prompt, when it is echoed."""
        if self._echoes is None:
            return b""
        logprobs = self._logprobs(delta.choice, delta.prompt_logprobs or ())
        return self._chunk(delta.choice, _encode(self._echoes[delta.choice // self._n]), logprobs, b"null")

    def text(self, delta: ChoiceDelta) -> bytes:
        """New text, with log probabilities where the delta has some."""
        if not delta.logprobs:
            return self._plain.event(delta)
        logprobs = self._logprobs(delta.choice, delta.logprobs)
        return self._chunk(delta.choice, _encode(delta.text), logprobs, b"null")

    def closing(self, choice: int, finish_reason: str) -> bytes:
        """The reason of the end."""
        return self._chunk(choice, b'""', b"null", _encode(finish_reason))

    def usage(self, usage: UsageBody) -> bytes:
        """Token counts."""
        return self._start + b'],"usage":' + _encode(usage) + b"}\n\n"

    def _logprobs(self, choice: int, tokens: tuple[TokenText, ...]) -> bytes:
        if not tokens:
            return b"null"
        shown, self._offsets[choice] = completion_logprobs(tokens, self._num_top, self._offsets.get(choice, 0))
        return _encode(shown)

    def _chunk(self, choice: int, text: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
        return (
            b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}%b'
            % (self._start, choice, text, logprobs, finish_reason, self._tail)
        )  # fmt: skip
