"""An owner of requests without stages: it says what it was told to say.

Owns: scripts (text, waits, failures) for every submitted request, and a note of everything that was asked of it.
Does not know: HTTP. It fulfils `busllm.requests.protocol.Owner`, so whatever serves requests can be tested alone.

Its tokenizer is the simplest there is: a token is a byte.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, assert_never

import anyio
import anyio.lowlevel

from busllm.errors import Aborted, BusllmError, ContextLengthExceeded, InvalidRequest
from busllm.ids import Uid, new_uid
from busllm.messages.codec import unpack_ids
from busllm.messages.control import Announcement
from busllm.messages.to_frontend import TokenText, Usage
from busllm.messages.to_tokenizer import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from busllm.requests.generation import ChoiceDelta, GenerationRequest

WORDS = ("The", " capital", " of", " France", " is", " Paris", ".")
VOCAB_SIZE = 259

Step = list[ChoiceDelta] | BusllmError | anyio.Event
"""What happens next: output, a failure, or a wait until somebody sets the event."""

Script = Callable[[GenerationRequest], Iterator[Step]]


class FakeOwner:
    """Runs a script for each request.

    Args:
        script: makes the steps of a request; the default answers with `WORDS`, one token per word.
        max_context_tokens: longer prompts fail as the tokenizer stage would make them fail.

    Attributes:
        submitted: every request, in order.
        aborted: uids of aborted requests, in order.
        refusal: what `submit`, `ask` and `peers` raise, if anything.
        unready: what `unready_reason` answers.
        announced: what `peers` answers.
    """

    def __init__(self, script: Script | None = None, *, max_context_tokens: int = 8192) -> None:
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.refusal: BusllmError | None = None
        self.unready: str | None = None
        self.announced: list[Announcement] = []
        self._script = script or say(WORDS)
        self._max_context_tokens = max_context_tokens
        self._live: dict[str, FakeLiveRequest] = {}
        self._changed = anyio.Event()

    def submit(self, request: GenerationRequest) -> FakeLiveRequest:
        """Notes the request and starts its script."""
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(request)
        live = FakeLiveRequest(new_uid(), self._steps(request))
        self._live[live.uid] = live
        self._note_change()
        return live

    def abort(self, uid: str) -> None:
        """Notes the abort and ends the request."""
        self.aborted.append(uid)
        live = self._live.pop(uid, None)
        if live is not None:
            live.fail(Aborted("The request was aborted."))
        self._note_change()

    def unready_reason(self) -> str | None:
        """What the test said."""
        return self.unready

    async def ask(self, kind: str, verb: str, question: dict[str, Any]) -> dict[str, Any]:
        """Answers as a tokenizer stage whose tokens are bytes."""
        await anyio.lowlevel.checkpoint()
        if self.refusal is not None:
            raise self.refusal
        match kind, verb:
            case "tokenizer", "tokenize":
                prompt = question.get("prompt")
                text = _chat_text(question["messages"]) if prompt is None else prompt
                return {"token_ids": list(text.encode())}
            case "tokenizer", "detokenize":
                return {"text": bytes(question["token_ids"]).decode("utf-8", "replace")}
            case _:
                raise InvalidRequest(f"nobody answers {verb} for {kind}")

    def peers(self) -> list[Announcement]:
        """What the test said."""
        if self.refusal is not None:
            raise self.refusal
        return self.announced

    async def wait_submitted(self, count: int) -> None:
        """Waits until that many requests came."""
        await self._wait(lambda: len(self.submitted) >= count)

    async def wait_aborted(self, count: int) -> None:
        """Waits until that many requests were aborted."""
        await self._wait(lambda: len(self.aborted) >= count)

    async def _wait(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _steps(self, request: GenerationRequest) -> Iterator[Step]:
        for prompt in request.prompts:
            num_tokens = len(prompt_bytes(prompt))
            if num_tokens >= self._max_context_tokens:
                yield ContextLengthExceeded(num_tokens, self._max_context_tokens)
                return
        yield from self._script(request)


class FakeLiveRequest:
    """A request whose output is scripted."""

    def __init__(self, uid: Uid, steps: Iterator[Step]) -> None:
        self.uid: str = uid
        self._steps = steps
        self._waiting_for: anyio.Event | None = None
        self._failure: BusllmError | None = None
        self._failed = anyio.Event()

    def fail(self, error: BusllmError) -> None:
        """Ends the request with an error, whatever it waits for."""
        self._failure = error
        self._failed.set()

    def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        await anyio.lowlevel.checkpoint()
        while True:
            if self._waiting_for is not None:
                await self._wait()
            if self._failure is not None:
                raise self._failure
            step = next(self._steps, None)
            match step:
                case None:
                    raise StopAsyncIteration
                case anyio.Event():
                    self._waiting_for = step
                case BusllmError():
                    raise step
                case _:
                    return step

    async def _wait(self) -> None:
        """Waits for the event of the script or for a failure; a cancelled wait is taken up again by the next call."""
        event = self._waiting_for
        assert event is not None
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when, self._failed, group.cancel_scope)
            await event.wait()
            group.cancel_scope.cancel()
        self._waiting_for = None


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


# ---------------------------------------------------------------- scripts


def say(words: Sequence[str], *, finish_reason: str = "stop") -> Script:
    """A script that says the words, one token each, in all choices at once; `max_tokens` cuts it."""

    def script(request: GenerationRequest) -> Iterator[Step]:
        limit = request.params.max_tokens
        said = words if limit is None else words[:limit]
        reason = "length" if limit is not None and limit <= len(words) else finish_reason
        choices = range(len(request.prompts) * request.n)
        for number, word in enumerate(said):
            yield [word_delta(request, choice, number, word) for choice in choices]
        yield [last_delta(request, choice, len(said), reason) for choice in choices]

    return script


def word_delta(request: GenerationRequest, choice: int, number: int, word: str) -> ChoiceDelta:
    """A delta with one word as one token."""
    num_top = request.params.logprobs
    logprobs = () if num_top is None else (token_text(word.encode(), num_top),)
    prompt = _prompt_logprobs(request, choice) if number == 0 else None
    return ChoiceDelta(choice, word, (number,), logprobs, prompt)


def last_delta(request: GenerationRequest, choice: int, num_tokens: int, finish_reason: str) -> ChoiceDelta:
    """The delta that ends a choice."""
    num_prompt_tokens = len(prompt_bytes(request.prompts[choice // request.n]))
    prompt = _prompt_logprobs(request, choice) if num_tokens == 0 else None
    usage = Usage(num_prompt_tokens, num_prompt_tokens // 2, num_tokens)
    return ChoiceDelta(choice, "", (), (), prompt, finish_reason, usage)


def token_text(token: bytes, num_top: int) -> TokenText:
    """A token with a log probability and alternatives."""
    top = tuple((rank, token if rank == 0 else b"alternative %d" % rank, -0.5 - rank) for rank in range(num_top))
    return TokenText(token, -0.5, top)


def prompt_bytes(prompt: Prompt) -> bytes:
    """The tokens of a prompt, each a byte."""
    match prompt:
        case TextPrompt(text):
            return text.encode()
        case TokenPrompt(packed):
            return bytes(token_id & 255 for token_id in unpack_ids(packed))
        case ChatPrompt(messages):
            return _chat_text(messages).encode()
        case _:
            assert_never(prompt)


def _prompt_logprobs(request: GenerationRequest, choice: int) -> tuple[TokenText, ...] | None:
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return None
    tokens = prompt_bytes(request.prompts[choice // request.n])
    first = (TokenText(tokens[:1], None),)
    return first + tuple(token_text(bytes((token,)), num_top) for token in tokens[1:])


def _chat_text(messages: Sequence[dict[str, Any]]) -> str:
    return "".join(f"<|{message['role']}|>{message['content']}" for message in messages)
