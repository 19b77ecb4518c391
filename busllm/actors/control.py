"""Answers to `control.<instance>.<verb>`, and to messages that failed.

Owns: the verbs that every actor answers (`traces`, `drain`), the form of an answer that is an error, and which errors
are of one message and which of the actor.
Does not know: the verbs of a stage (`Behaviour.control`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from busllm.actors.behaviour import Behaviour
from busllm.bus.protocol import Message
from busllm.errors import (
    AnswerTooLarge,
    BusError,
    BusllmError,
    EngineError,
    InvalidRequest,
    PayloadTooLarge,
    Superseded,
)
from busllm.messages.codec import encode_json
from busllm.messages.control import error_answer
from busllm.telemetry.trace import TraceRecorder

if TYPE_CHECKING:
    from busllm.actors.actor import Actor

MAX_TRACED_REQUESTS = 100
# After these the actor itself is not what it should be. Everything else is the matter of one message.
ENDS_THE_ACTOR = (Superseded, EngineError)


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
    except ENDS_THE_ACTOR:
        raise
    except BusllmError as error:
        answer = error_answer(error)
    except Exception:  # the stage boundary: who asked gets an answer, the log the traceback
        actor.log.exception("message_failed", subject=message.subject)
        answer = error_answer(internal_error(actor.instance))
    send_answer(actor, message.reply, answer)


def send_answer(actor: Actor, reply: str | None, answer: bytes) -> None:
    """Answers in one message, since whoever asks reads one; an answer that is too large becomes an error that says so.

    What cannot be answered (no connection, a reply subject that is none) is logged: who asked waits no longer than it
    chose to.
    """
    if reply is None:
        return
    try:
        try:
            actor.connection.publish(reply, answer)
        except PayloadTooLarge as error:
            too_large = AnswerTooLarge(error.payload_bytes, error.max_payload_bytes)
            actor.connection.publish(reply, error_answer(too_large))
    except BusError as error:
        actor.log.warning("not_answered", reply=reply, reason=error.message)


def internal_error(instance: str) -> BusllmError:
    """What others are told of a fault of this instance: nothing of its inside."""
    return BusllmError(f"{instance} failed to handle this message; its log says why.")


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
