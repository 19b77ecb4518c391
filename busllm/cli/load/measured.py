"""One streamed request as its client sees it.

Owns: `Measured`, and sending one request and noting when its text arrived.
Does not know: the other requests (`run.py`), what is made of the times (`report.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
import msgspec

from busllm.cli.event_stream import DONE, Chunk, EventStream, chunk_decoder
from busllm.cli.http_target import HttpFailure, HttpTarget, error_text
from busllm.cli.load.http_stream import StreamedAnswer, post

_OK = 200
_MAX_ERROR_CHARS = 200


class Measured(msgspec.Struct):
    """What became of one request; times are `time.perf_counter()`.

    Attributes:
        began_s: when the connection was asked for.
        text_s: when each event with new text arrived; two in one piece of the answer have the same time.
        ended_s: when the answer was complete or had failed.
        prompt_tokens, completion_tokens: as the server counts; None when it did not say.
        error: why it failed; None when it did not.
    """

    began_s: float
    text_s: list[float] = []
    ended_s: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None

    def take(self, chunk: Chunk, now_s: float) -> None:
        """Notes one event.

        Raises:
            HttpFailure: it is an error.
        """
        if chunk.error is not None:
            raise HttpFailure(str(chunk.error)[:_MAX_ERROR_CHARS])
        if any(choice.new_text for choice in chunk.choices):
            self.text_s.append(now_s)
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens
            self.completion_tokens = chunk.usage.completion_tokens


async def measure(
    target: HttpTarget, path: str, body: bytes, timeout_s: float, on_begun: Callable[[], None] = lambda: None
) -> Measured:
    """Sends one request and reads its answer; every failure is noted, none raised.

    Args:
        on_begun: is called at the first text.
    """
    measured = Measured(began_s=time.perf_counter())
    try:
        with anyio.fail_after(timeout_s):
            async with post(target, path, body) as answer:
                await _read(answer, measured, on_begun)
    except HttpFailure as error:
        measured.error = error.message
    except TimeoutError:
        measured.error = f"not complete after {timeout_s:g} s"
    except (OSError, anyio.BrokenResourceError) as error:
        measured.error = f"{type(error).__name__}: {error}"
    measured.ended_s = time.perf_counter()
    return measured


async def _read(answer: StreamedAnswer, measured: Measured, on_begun: Callable[[], None]) -> None:
    if answer.status != _OK:
        body = b"".join([piece async for piece in answer.pieces()])
        raise HttpFailure(error_text(answer.status, body)[:_MAX_ERROR_CHARS])
    events, has_begun = EventStream(), False
    async for piece in answer.pieces():
        now_s = time.perf_counter()
        for data in events.feed(piece):
            if data == DONE:
                return
            try:
                measured.take(chunk_decoder.decode(data), now_s)
            except msgspec.DecodeError as error:
                raise HttpFailure(f"An event is no chunk of an answer: {error}.") from error
        if not has_begun and measured.text_s:
            has_begun = True
            on_begun()
    raise HttpFailure("The answer ended without [DONE].")
