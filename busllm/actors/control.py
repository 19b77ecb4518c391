"""Answers to `control.<instance>.<verb>`.

Owns: the verbs that every actor answers (`traces`, `drain`) and the form of an answer that is an error.
Does not know: the verbs of a stage (`Behaviour.control`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from busllm.actors.behaviour import Behaviour
from busllm.bus.protocol import Message
from busllm.errors import BusError, BusllmError, InvalidRequest
from busllm.messages.codec import encode_json
from busllm.messages.control import error_answer
from busllm.telemetry.trace import TraceRecorder

if TYPE_CHECKING:
    from busllm.actors.actor import Actor

MAX_TRACED_REQUESTS = 100


class TracesQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """Question of the verb `traces`: the events of one request, or of the latest ones."""

    uid: str | None = None
    limit: int = 20


async def answer_control(actor: Actor, behaviour: Behaviour, message: Message) -> None:
    """Answers one question; every outcome is an answer."""
    verb = message.subject.rpartition(".")[2]
    try:
        match verb:
            case "drain":
                actor.stop()
                answer = b"{}"
            case "traces":
                answer = _traces(actor.instance, actor.trace, message.payload)
            case _:
                answer = await behaviour.control(verb, message.payload)
    except BusllmError as error:
        answer = error_answer(error)
    if message.reply is None:
        return
    try:
        actor.connection.publish(message.reply, answer)
    except BusError as error:
        actor.try_publish(message.reply, error_answer(error))


def _traces(instance: str, recorder: TraceRecorder, payload: bytes) -> bytes:
    try:
        question = msgspec.json.decode(payload or b"{}", type=TracesQuestion)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"traces: {error}") from error
    if question.uid is not None:
        events = recorder.events_of(question.uid)
    else:
        events = recorder.latest(max(1, min(question.limit, MAX_TRACED_REQUESTS)))
    return encode_json({"instance": instance, "events": events})
