"""One request at its owner: which attempt, who holds it, what the client has, what it has not read yet.

Owns: the state of each choice (the record that a sending-on repeats), the merging slot of unread output, the one end.
Does not know: the bus and the clock's ticks (`owner.py` decides when to ask and where to send).
"""

from __future__ import annotations

import enum

import anyio

from busllm.errors import BusllmError
from busllm.requests.generation import ChoiceDelta, GenerationRequest

MAX_UNREAD_DELTAS = 256  # and one per choice; more that a slow reader leaves are merged


class Phase(enum.Enum):
    """Where a request is, as far as its owner knows."""

    TOKENIZING = "tokenizing"
    SCHEDULED = "scheduled"


class WaitsFor(enum.Enum):
    """What keeps a request from being sent."""

    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    BUS = "bus"
    PAUSE = "pause"


class Choice:
    """What the client has of one choice (what waits to be read included), and what is known of its holder.

    Attributes:
        taken: a scheduler has said that it holds this choice of the current attempt.
        heard_at: when something of it was heard last; None = ask about it now.
        asked_at: when it was asked about last.
        strikes: doubtful answers in a row.
    """

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.output_ids: list[int] = []
        self.delivered_chars = 0
        self.finished = False
        self.sent(now)

    def sent(self, now: float) -> None:
        """It was sent to somebody: what was known of its holder is void."""
        self.taken = False
        self.heard(now)

    def heard(self, now: float) -> None:
        """Something of it was heard."""
        self.heard_at: float | None = now
        self.asked_at = now
        self.strikes = 0

    def asks_at(self, silence_s: float, strike_s: float) -> float:
        """When it is time to ask about it (again), unless something of it is heard before."""
        if self.heard_at is None:
            return self.asked_at + strike_s
        return max(self.heard_at, self.asked_at) + (strike_s if self.strikes else silence_s)


class LiveRequest:
    """One request; the client's side iterates it, the owner's side feeds it.

    Attributes:
        uid: the request.
        attempt: of the current try; replies of other attempts are ignored.
        phase, tokenizer, scheduler, detokenizer: who holds it.
        taken: the tokenizer has said so.
        was_scheduled: a scheduler has taken it at least once.
        waits_for: what is missing, while the request is with nobody.
        not_before: with `PAUSE`, when it may be sent.
        trouble_since: when it lost its holder or found nobody, None while all is well.
        fruitless: tries in a row that brought no new token.
        holders_lost: instances that ended or vanished while they held it, since the last new token.
        avoid: instances that lost it.
    """

    def __init__(self, uid: str, request: GenerationRequest, seed: int, now: float) -> None:
        self.uid = uid
        self.request = request
        self.seed = seed
        self.attempt = 0
        self.phase = Phase.TOKENIZING
        self.prompt_ids: tuple[bytes, ...] | None = None
        self.tokenizer: str | None = None
        self.scheduler: str | None = None
        self.detokenizer: str | None = None
        self.taken = False
        self.was_scheduled = False
        self.waits_for: WaitsFor | None = None
        self.not_before = now
        self.trouble_since: float | None = None
        self.fruitless = 0
        self.holders_lost: set[str] = set()
        self.avoid: tuple[str, ...] = ()
        self.sent_at = now
        self.heard_at = now
        self.choices = [Choice(number, now) for number in range(len(request.prompts) * request.n)]
        self.has_text = False
        self.num_unfinished = len(self.choices)
        self._unread: list[ChoiceDelta] = []
        self._max_unread = MAX_UNREAD_DELTAS + len(self.choices)
        self._error: BusllmError | None = None
        self._ended = False
        # One object for all waits of the one reader: events would have to be made anew, thousands of them each second.
        self._wake = anyio.Semaphore(0, fast_acquire=True)
        self._is_awaited = False

    # ------------------------------------------------------------ owner's side

    @property
    def is_done(self) -> bool:
        """Every choice has finished, or the request failed."""
        return self.num_unfinished == 0 or self._error is not None

    @property
    def error(self) -> BusllmError | None:
        """Why the request failed, until the reader was told."""
        return self._error

    def unfinished(self) -> list[Choice]:
        """Choices that have not ended."""
        return [choice for choice in self.choices if not choice.finished]

    def holders(self) -> tuple[str, ...]:
        """Instances that the request depends on now."""
        if self.phase is Phase.TOKENIZING:
            return (self.tokenizer,) if self.tokenizer else ()
        return tuple(instance for instance in (self.scheduler, self.detokenizer) if instance)

    def give(self, delta: ChoiceDelta) -> None:
        """Takes new output of a choice, for the record and for the reader; with a finish reason it is the last."""
        choice = self.choices[delta.choice]
        choice.output_ids.extend(delta.token_ids)
        choice.delivered_chars += len(delta.text)
        if delta.finish_reason is not None:
            choice.finished = True
            self.num_unfinished -= 1
        if len(self._unread) >= self._max_unread:
            self._unread = _merged(self._unread)
        self._unread.append(delta)
        self._wake_reader()

    def fail(self, error: BusllmError) -> None:
        """The request ends with an error; the first end counts."""
        if not self.is_done:
            self._error = error
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._is_awaited:
            self._is_awaited = False
            self._wake.release()

    # ------------------------------------------------------------ reader's side

    def __aiter__(self) -> LiveRequest:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        """Waits for output and gives all that is unread, in order; see `protocol.LiveRequest`.

        Raises:
            StopAsyncIteration: every choice has finished and was read.
            BusllmError: the request failed (said once).
        """
        while not self._unread and self._error is None:
            if self._ended or self.num_unfinished == 0:
                raise StopAsyncIteration
            self._is_awaited = True
            await self._wake.acquire()
        if self._unread:
            deltas, self._unread = self._unread, []
            return deltas
        error, self._error, self._ended = self._error, None, True
        assert error is not None
        self.num_unfinished = 0
        raise error


def _merged(deltas: list[ChoiceDelta]) -> list[ChoiceDelta]:
    """The same output with one delta per choice."""
    of_choice: dict[int, list[ChoiceDelta]] = {}
    for delta in deltas:
        of_choice.setdefault(delta.choice, []).append(delta)
    return [
        ChoiceDelta(
            choice=choice,
            text="".join(delta.text for delta in parts),
            token_ids=tuple(token_id for delta in parts for token_id in delta.token_ids),
            logprobs=tuple(one for delta in parts for one in delta.logprobs),
            prompt_logprobs=next((delta.prompt_logprobs for delta in parts if delta.prompt_logprobs is not None), None),
            finish_reason=parts[-1].finish_reason,
            usage=parts[-1].usage,
        )
        for choice, parts in of_choice.items()
    ]
