"""Who has a request now.

Owns: asking owners for their live requests and stages for what they hold, and reading the answers.
Does not know: what follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from busllm.actors.actor import Actor
from busllm.actors.survey import Question, ask_everyone
from busllm.ids import parse_instance
from busllm.messages.codec import encode_json
from busllm.messages.control import Announcement, Probe, live_answer_decoder, probe_answer_decoder

KINDS_THAT_OWN_REQUESTS = ("frontend", "client")


class Holders(msgspec.Struct, frozen=True):
    """Where a request is.

    Attributes:
        states: instance → what the request does there: `open` at its owner, `waiting` or `running` at a stage.
        silent: instances that did not answer, each with the reason.
    """

    states: dict[str, str]
    silent: dict[str, str]


async def find_holders(actor: Actor, asked: Iterable[Announcement], uid: str, *, wait_s: float) -> Holders:
    """Asks all instances for one request."""
    probe = encode_json(Probe((uid,)))

    def question(announced: Announcement) -> Question:
        return ("live", b"") if announced.kind in KINDS_THAT_OWN_REQUESTS else ("probe", probe)

    survey = await ask_everyone(actor, asked, question, wait_s=wait_s)
    found = {instance: state_in(uid, instance, answer) for instance, answer in survey.answers.items()}
    return Holders({instance: state for instance, state in found.items() if state is not None}, survey.silent)


def state_in(uid: str, instance: str, answer: bytes) -> str | None:
    """What a request does at an instance, by its answer to `live` or `probe`; None = nothing any more."""
    if parse_instance(instance)[0] in KINDS_THAT_OWN_REQUESTS:
        return "open" if any(uid == one for one, _ in live_answer_decoder.decode(answer).live) else None
    sequences = probe_answer_decoder.decode(answer).sequences.get(uid, ())
    states = sorted({sequence.state for sequence in sequences} - {"finished"})
    return ", ".join(states) or None
