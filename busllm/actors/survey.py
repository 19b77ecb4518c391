"""One question to many instances at once.

Owns: asking each instance a control verb at the same time, and telling who gave no answer and why.
Does not know: verbs and what answers mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio
import msgspec

from busllm.actors.actor import Actor
from busllm.errors import BusError, RemoteError
from busllm.messages.control import Announcement, raise_if_error

Question = tuple[str, bytes]  # verb and payload


class Survey(msgspec.Struct, frozen=True):
    """What became of a question.

    Attributes:
        answers: payload by instance.
        silent: instances without a good answer, each with the reason.
    """

    answers: dict[str, bytes]
    silent: dict[str, str]


async def ask_everyone(
    actor: Actor, asked: Iterable[Announcement], question: Callable[[Announcement], Question], *, wait_s: float
) -> Survey:
    """Asks all at once and waits for each for at most `wait_s`; never raises for one that cannot answer."""
    survey = Survey({}, {})

    async def ask(announced: Announcement) -> None:
        verb, payload = question(announced)
        subject = actor.subjects.control(announced.instance, verb)
        try:
            answer = await actor.connection.request(subject, payload, timeout_s=wait_s)
            raise_if_error(answer)
        except (BusError, RemoteError) as error:
            survey.silent[announced.instance] = error.message
        else:
            survey.answers[announced.instance] = answer

    async with anyio.create_task_group() as tasks:
        for announced in asked:
            tasks.start_soon(ask, announced)
    return survey
