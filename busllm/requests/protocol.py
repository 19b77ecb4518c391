"""What a frontend (or any other client of the bus) asks of an owner of requests.

Owns: the protocols `Owner` and `LiveRequest`, with their guarantees in sentences.
Does not know: how a request is sent, watched and sent on (`owner.py`), nor HTTP (`stages/frontend/`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from busllm.messages.control import Announcement
from busllm.requests.generation import ChoiceDelta, GenerationRequest


class LiveRequest(Protocol):
    """A request under way: an asynchronous iterator of what is new.

    Each step waits for new output and gives everything that came since the last one, in order: a delta for each step of
    the engine that gave something. Only what a slow reader leaves unread for long is merged. It stops after the last
    delta of every choice. A failure is raised once, as a `BusllmError`; nothing follows it. Cancelling a step loses
    nothing: the next one gives what was there.
    """

    @property
    def uid(self) -> str:
        """The uid that goes all the way."""
        ...

    def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]: ...

    async def __anext__(self) -> list[ChoiceDelta]:
        """Waits for new output.

        Raises:
            StopAsyncIteration: every choice has finished.
            BusllmError: the request failed or was aborted; raised once.
        """
        ...


class Owner(Protocol):
    """Owns requests from their submission to their end."""

    def submit(self, request: GenerationRequest) -> LiveRequest:
        """Sends a checked request on its way.

        Raises:
            Unavailable: a stage is missing, the bus is away, a queue is full, or this instance is draining.
        """
        ...

    def abort(self, uid: str) -> None:
        """Ends a request whose client has left, everywhere; unknown and finished uids are ignored."""
        ...

    def unready_reason(self) -> str | None:
        """Why requests cannot be served now; None when they can."""
        ...

    async def ask(self, kind: str, verb: str, question: dict[str, Any]) -> dict[str, Any]:
        """Asks a ready instance of a kind of stage a question and returns its answer.

        Raises:
            BusllmError: what the stage reported, or that none could be asked.
        """
        ...

    def peers(self) -> list[Announcement]:
        """The instances that are known now, this one included, as they last announced themselves; none while this
        owner is not on the bus yet."""
        ...
