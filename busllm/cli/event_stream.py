"""Server-sent events as OpenAI-compatible servers send them.

Owns: finding the `data` of each event in the bytes of an answer, in whatever pieces they arrive; reading one chunk of a
completion or of a chat.
Does not know: HTTP.

Lines end with LF or CRLF alone: JSON may hold other line separators as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"


class EventStream:
    """Takes the bytes of one answer, gives events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """The `data` of every event that is complete now; comments give nothing."""
        text = self._rest + received
        if b"\r" in text:
            held = text.endswith(b"\r")  # its LF may be in the next piece
            text = text[:-1].replace(b"\r\n", b"\n") + b"\r" if held else text.replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        return [data for data in map(_data_of, events) if data]


def _data_of(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class Delta(msgspec.Struct):
    """What is new in a chat."""

    content: str | None = None


class ChunkChoice(msgspec.Struct):
    """What is new in one choice."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        """The new text, of a chat or of a completion."""
        return self.text or (self.delta.content if self.delta is not None else None) or ""


class ChunkUsage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """One event of a streamed answer; fields that no command needs are passed over."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: Any = None


chunk_decoder = msgspec.json.Decoder(Chunk)
