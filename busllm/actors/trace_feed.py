"""Trace events of other instances: what they remember, and what happens now.

Owns: the question `traces` to many, and reading the events that arrive on a connection.
Does not know: requests; how events are recorded (`telemetry/trace.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from busllm.actors.actor import Actor
from busllm.actors.survey import ask_everyone
from busllm.bus.protocol import Connection, ConnectionClosed, Message
from busllm.errors import MalformedMessage
from busllm.messages.codec import Decoder, encode_json
from busllm.messages.control import Announcement
from busllm.telemetry.logging import get_logger
from busllm.telemetry.trace import TraceEvent


class Traces(msgspec.Struct, frozen=True):
    """What several instances remember.

    Attributes:
        events: of one instance in the order in which they happened; instances in no particular order.
        silent: instances that did not answer, each with the reason.
    """

    events: tuple[TraceEvent, ...]
    silent: dict[str, str]


class TracesAnswer(msgspec.Struct, frozen=True):
    """Answer of the control verb `traces`."""

    instance: str
    events: tuple[TraceEvent, ...]


answer_decoder: Decoder[TracesAnswer] = Decoder(TracesAnswer, json=True)
event_decoder: Decoder[TraceEvent] = Decoder(TraceEvent, json=True)


async def collect_traces(
    actor: Actor, asked: Iterable[Announcement], question: dict[str, Any], *, wait_s: float
) -> Traces:
    """Asks all instances for what they remember of one request (`uid`) or of the latest (`limit`)."""
    payload = encode_json(question)
    survey = await ask_everyone(actor, asked, lambda _: ("traces", payload), wait_s=wait_s)
    answers = [answer_decoder.decode(answer) for answer in survey.answers.values()]
    return Traces(tuple(event for answer in answers for event in answer.events), survey.silent)


async def arriving_events(connection: Connection) -> AsyncIterator[TraceEvent]:
    """Yields the events that arrive on a connection until it is closed; what is lost or no event is logged."""
    log = get_logger("busllm.trace_feed")
    while True:
        try:
            batch = await connection.receive()
        except ConnectionClosed:
            return
        for item in batch:
            if not isinstance(item, Message):
                log.warning("trace_feed_interrupted", reason=repr(item))
                continue
            try:
                event = event_decoder.decode(item.payload)
            except MalformedMessage as error:  # anybody may publish there
                log.warning("malformed_trace_event", subject=item.subject, reason=error.message)
                continue
            yield event
