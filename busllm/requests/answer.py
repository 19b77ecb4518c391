"""The output of one request for a program that reads it: as it comes, or whole.

Owns: `Generation` and `Answer`; that a request which nobody reads any more is aborted.
Does not know: how the request lives (`live.py`), HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable

import msgspec

from busllm.messages.to_frontend import TokenText, Usage
from busllm.requests.generation import ChoiceDelta
from busllm.requests.protocol import LiveRequest


class Answer(msgspec.Struct, frozen=True):
    """A whole answer.

    Attributes:
        text: without the stop string that ended it.
        token_ids: the tokens that made the text.
        finish_reason: stop | length.
        usage: token counts.
        logprobs: one per token, when asked for.
        prompt_logprobs: one per token of the prompt, when asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    logprobs: tuple[TokenText, ...] = ()
    prompt_logprobs: tuple[TokenText, ...] | None = None


class Generation:
    """The output of one request as it comes; leaving the loop, or cancelling it, aborts the request.

    Attributes:
        uid: of the request, for traces, aborts and logs.
    """

    def __init__(self, live: LiveRequest, abort: Callable[[str], None]) -> None:
        self.uid = live.uid
        self._abort = abort
        self._deltas = _deltas_of(live, abort)

    def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        return self

    async def __anext__(self) -> ChoiceDelta:
        """Waits for new output of one choice.

        Raises:
            StopAsyncIteration: every choice has finished.
            BusllmError: the request failed, or was aborted.
        """
        return await anext(self._deltas)

    async def aclose(self) -> None:
        """Aborts the request unless it has ended."""
        await self._deltas.aclose()
        self._abort(self.uid)  # a generator that has not begun has no `finally` to run

    async def whole(self) -> Answer:
        """Reads a request with one choice to its end.

        Raises:
            BusllmError: the request failed, or was aborted.
        """
        deltas = [delta async for delta in self]
        return Answer(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            finish_reason=next((delta.finish_reason for delta in reversed(deltas) if delta.finish_reason), ""),
            usage=next((delta.usage for delta in reversed(deltas) if delta.usage), Usage(0, 0, 0)),
            logprobs=tuple(one for delta in deltas for one in delta.logprobs),
            prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None),
        )


async def _deltas_of(live: LiveRequest, abort: Callable[[str], None]) -> AsyncGenerator[ChoiceDelta, None]:
    try:
        async for deltas in live:
            for delta in deltas:
                yield delta
    finally:
        abort(live.uid)  # ignored when the request has ended
