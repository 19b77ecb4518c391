"""From a submitted request to an answer, the part that both generating endpoints share.

Owns: the wait for the first text, the order of events in a stream, gathering for a whole answer, token counts, the
abort of what nobody reads any more.
Does not know: the shape of chunks (`chunks.py`), HTTP (`exchange.py`), how a request travels (`busllm/requests/`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable

import anyio

from busllm.errors import BusllmError
from busllm.messages.to_frontend import TokenText, Usage
from busllm.requests.generation import ChoiceDelta, GenerationRequest
from busllm.requests.protocol import LiveRequest, Owner
from busllm.stages.frontend.answers import PromptTokensDetails, UsageBody
from busllm.stages.frontend.chunks import Chunks
from busllm.stages.frontend.exchange import PING
from busllm.stages.frontend.http import EventStream, Request
from busllm.stages.frontend.metrics import FrontendMetrics, GenerationMeter
from busllm.stages.frontend.services import Services

DONE = b"data: [DONE]\n\n"


class Output:
    """Deltas of a submitted request, timed. What is left unfinished when the exchange ends is aborted."""

    def __init__(self, live: LiveRequest, owner: Owner, meter: GenerationMeter) -> None:
        self._live = live
        self._owner = owner
        self._meter = meter
        self._open = True

    def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        try:
            deltas = await self._live.__anext__()
        except (StopAsyncIteration, BusllmError):
            self._open = False
            raise
        self._meter.observe(deltas)
        return deltas

    def close(self) -> None:
        """Aborts the request if it has not ended."""
        if self._open:
            self._open = False
            self._owner.abort(self._live.uid)


def submit(services: Services, request: Request, generation: GenerationRequest) -> Output:
    """Submits a checked request; from here on the exchange has its uid, and its end is the request's end.

    Raises:
        Unavailable: nobody can take it now.
    """
    live = services.owner.submit(generation)
    request.uid = live.uid
    output = Output(live, services.owner, services.metrics.meter())
    request.cleanup.callback(output.close)
    return output


class UsageTally:
    """Adds up the token counts of a request's choices; a prompt counts once, by its first choice.

    Args:
        n: choices per prompt.
    """

    def __init__(self, n: int, metrics: FrontendMetrics) -> None:
        self._n = n
        self._metrics = metrics
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0

    def add(self, delta: ChoiceDelta) -> None:
        """Takes the last delta of a choice."""
        usage = delta.usage or Usage(0, 0, 0)
        is_first = delta.choice % self._n == 0
        if is_first:
            self._prompt_tokens += usage.prompt_tokens
            self._cached_tokens += usage.cached_tokens
        self._completion_tokens += usage.completion_tokens
        self._metrics.count_usage(usage, first_of_prompt=is_first)

    def total(self) -> UsageBody:
        """The counts of the request."""
        return UsageBody(
            self._prompt_tokens,
            self._completion_tokens,
            self._prompt_tokens + self._completion_tokens,
            PromptTokensDetails(self._cached_tokens),
        )


# ---------------------------------------------------------------- whole answers


class Gathered:
    """Everything that one choice said."""

    def __init__(self, choice: int) -> None:
        self.choice = choice
        self.finish_reason = ""
        self.logprobs: list[TokenText] = []
        self.prompt_logprobs: tuple[TokenText, ...] = ()
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def add(self, delta: ChoiceDelta) -> None:
        """Takes new output."""
        self._texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs += delta.prompt_logprobs or ()
        self.finish_reason = delta.finish_reason or self.finish_reason


async def gather(output: Output, num_choices: int, tally: UsageTally) -> list[Gathered]:
    """Waits for the end of every choice.

    Raises:
        BusllmError: the request failed; nothing of it is answered.
    """
    choices = [Gathered(choice) for choice in range(num_choices)]
    async for deltas in output:
        for delta in deltas:
            choices[delta.choice].add(delta)
            if delta.finish_reason is not None:
                tally.add(delta)
    return choices


# ---------------------------------------------------------------- streams


async def event_stream(
    output: Output, chunks: Chunks, tally: UsageTally, *, with_usage: bool, header_wait_s: float
) -> EventStream:
    """Waits for the first text, then gives the stream; after `header_wait_s` the stream begins with a ping.

    Raises:
        BusllmError: the request failed before there was any text: the client gets it as a plain HTTP error.
    """
    first: list[ChoiceDelta] = []
    with anyio.move_on_after(header_wait_s) as wait:
        while not any(delta.text or delta.finish_reason for delta in first):
            first += await anext(output)
    prefix = PING if wait.cancelled_caught else b""
    return EventStream(_events(prefix, first, output, chunks, tally, with_usage))


async def _events(
    prefix: bytes,
    first: list[ChoiceDelta],
    output: Output,
    chunks: Chunks,
    tally: UsageTally,
    with_usage: bool,
) -> AsyncGenerator[bytes, None]:
    opened: set[int] = set()
    if events := prefix + _render(first, opened, chunks, tally):
        yield events
    async for deltas in output:
        if events := _render(deltas, opened, chunks, tally):
            yield events
    yield chunks.usage(tally.total()) + DONE if with_usage else DONE


def _render(deltas: Iterable[ChoiceDelta], opened: set[int], chunks: Chunks, tally: UsageTally) -> bytes:
    """The events of one wake-up, joined, so that they are sent at once."""
    events: list[bytes] = []
    for delta in deltas:
        if delta.choice not in opened:
            opened.add(delta.choice)
            events.append(chunks.opening(delta))
        if delta.text or delta.logprobs:
            events.append(chunks.text(delta))
        if delta.finish_reason is not None:
            events.append(chunks.closing(delta.choice, delta.finish_reason))
            tally.add(delta)
    return b"".join(events)
