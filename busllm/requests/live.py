"""One request at its owner: which attempt, who holds it, what the client has, what it has not read yet.

Owns: the state of each choice (the record that a sending-on repeats), the merging slot of unread output, the one end.
Does not know: the bus and the clock's ticks (`owner.py` decides when to ask and where to send).
"""

from __future__ import annotations

import enum

import anyio

from busllm.errors import BusllmError
from busllm.messages.to_frontend import TokenText, Usage
from busllm.requests.generation import ChoiceDelta, GenerationRequest


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
    """What the client has of one choice, and what waits to be read.

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
        self._clear()

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

    def _clear(self) -> None:
        self._texts: list[str] = []
        self._new_ids: list[int] = []
        self._logprobs: list[TokenText] = []
        self._prompt_logprobs: tuple[TokenText, ...] | None = None
        self._finish_reason: str | None = None
        self._usage: Usage | None = None

    def add(self, text: str, token_ids: list[int], logprobs: tuple[TokenText, ...]) -> None:
        """Takes new output."""
        self.output_ids.extend(token_ids)
        self.delivered_chars += len(text)
        self._texts.append(text)
        self._new_ids.extend(token_ids)
        self._logprobs.extend(logprobs)

    def add_prompt_logprobs(self, logprobs: tuple[TokenText, ...]) -> None:
        """Takes the log probabilities of the prompt."""
        self._prompt_logprobs = logprobs

    def finish(self, reason: str, usage: Usage) -> None:
        """Takes the end."""
        self.finished = True
        self._finish_reason = reason
        self._usage = usage

    def take(self) -> ChoiceDelta:
        """Everything unread as one delta."""
        delta = ChoiceDelta(
            choice=self.number,
            text="".join(self._texts),
            token_ids=tuple(self._new_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=self._finish_reason,
            usage=self._usage,
        )
        self._clear()
        return delta


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
        holders_lost: holders that died since the last new token.
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
        self.holders_lost = 0
        self.avoid: tuple[str, ...] = ()
        self.sent_at = now
        self.heard_at = now
        self.choices = [Choice(number, now) for number in range(len(request.prompts) * request.n)]
        self.has_text = False
        self._unread: dict[int, None] = {}
        self.num_unfinished = len(self.choices)
        self._error: BusllmError | None = None
        self._ended = False
        self._wake = anyio.Event()

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

    def deliver(self, choice: Choice) -> None:
        """A choice has something new for the reader."""
        self._unread[choice.number] = None
        self._wake.set()

    def finish(self, choice: Choice, reason: str, usage: Usage) -> None:
        """One choice has ended."""
        choice.finish(reason, usage)
        self.num_unfinished -= 1
        self.deliver(choice)

    def fail(self, error: BusllmError) -> None:
        """The request ends with an error; the first end counts."""
        if not self.is_done:
            self._error = error
            self._wake.set()

    # ------------------------------------------------------------ reader's side

    def __aiter__(self) -> LiveRequest:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        """Waits for output; what came since the last call is merged, one delta per choice.

        Raises:
            StopAsyncIteration: every choice has finished and was read.
            BusllmError: the request failed (said once).
        """
        while not self._unread and self._error is None:
            if self._ended or self.num_unfinished == 0:
                raise StopAsyncIteration
            self._wake = anyio.Event()
            await self._wake.wait()
        if self._unread:
            deltas = [self.choices[number].take() for number in self._unread]
            self._unread = {}
            return deltas
        error, self._error, self._ended = self._error, None, True
        assert error is not None
        self.num_unfinished = 0
        raise error
