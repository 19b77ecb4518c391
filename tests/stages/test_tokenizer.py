"""The tokenizer stage alone: every request is answered, handed on, or forgotten for a reason."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from busllm.messages.codec import encode, pack_ids, unpack_ids
from busllm.messages.control import StageState
from busllm.messages.parts import split
from busllm.messages.to_frontend import Failed, Taken, Tokenized
from busllm.messages.to_frontend import decoder as to_frontend
from busllm.messages.to_scheduler import decoder as to_scheduler
from busllm.messages.to_tokenizer import ChatPrompt, Prompt, TextPrompt, Tokenize, TokenPrompt
from busllm.sampling import SamplingParams
from busllm.stages.tokenizer import TokenizerStage
from busllm.text.null_tokenizer import NullTokenizer
from busllm.text.tokenizer import Tokenizer
from tests.stages.wire import FRONTEND, SCHEDULER, SUBJECTS, Wire, running

pytestmark = pytest.mark.anyio

CONTEXT, VOCABULARY = 100, 259


def stage(tokenizer: type[NullTokenizer] = NullTokenizer) -> TokenizerStage:
    return TokenizerStage(tokenizer, CONTEXT, VOCABULARY)


class Gated(NullTokenizer):
    """Encodes when it may."""

    may_encode = threading.Event()

    def encode_batch(self, texts: Any, add_special_tokens: bool) -> list[list[int]]:
        assert self.may_encode.wait(10.0)
        return super().encode_batch(texts, add_special_tokens)


@pytest.fixture
def gated() -> Any:
    Gated.may_encode = threading.Event()
    yield Gated
    Gated.may_encode.set()


def tokenize(uid: str, *prompts: Prompt, attempt: int = 1, n: int = 1, frontend: str = FRONTEND) -> Tokenize:
    return Tokenize(uid, attempt, frontend, prompts or (TextPrompt("hello"),), SamplingParams(), seed=7, n=n)


def send(wire: Wire, message: Tokenize) -> None:
    wire.send(SUBJECTS.tokenize(wire.actor.instance, message.uid), message)


async def test_a_request_is_taken_tokenized_and_handed_on() -> None:
    async with running(stage()) as wire:
        await wire.announce(SCHEDULER)
        send(wire, tokenize("u", TextPrompt("ab"), TokenPrompt(pack_ids([5, 6, 7])), n=2))
        taken, tokenized = await wire.replies(to_frontend, 2, "u")
        assert taken == Taken("u", 1, "tokenizer", wire.actor.instance)
        assert isinstance(tokenized, Tokenized)
        assert [unpack_ids(ids).tolist() for ids in tokenized.prompt_ids] == [[97, 98], [5, 6, 7]]
        assert tokenized.scheduler == SCHEDULER
        messages = await wire.wait_for(SUBJECTS.generate(SCHEDULER, "u"), 2)
        handed_on = [to_scheduler.decode(message.payload) for message in messages]
        assert [[start.choice for start in generate.choices] for generate in handed_on] == [[0, 1], [2, 3]]
        assert {message.reply for message in messages} == {SUBJECTS.reply(FRONTEND, "u")}
        assert wire.events("u") == ["tokenized"]
        assert wire.statistics() == {"requests": 0, "tokenized": 1}


@pytest.mark.parametrize(
    ("prompt", "code", "param"),
    [
        (TextPrompt(""), "invalid_value", "prompt"),
        (TokenPrompt(b""), "invalid_value", "prompt"),
        (TokenPrompt(pack_ids([VOCABULARY])), "invalid_value", "prompt"),
        (TokenPrompt(pack_ids([-1])), "invalid_value", "prompt"),
        (TextPrompt("x" * CONTEXT), "context_length_exceeded", "prompt"),
        (ChatPrompt([{"role": "user", "content": "x" * CONTEXT}]), "context_length_exceeded", "messages"),
        (ChatPrompt([{"role": "user", "content": None}]), "invalid_value", "messages"),
    ],
    ids=["no text", "no ids", "beyond the vocabulary", "negative", "too long", "too long a chat", "no content"],
)
async def test_what_cannot_be_served_is_answered_and_not_handed_on(prompt: Prompt, code: str, param: str) -> None:
    async with running(stage()) as wire:
        await wire.announce(SCHEDULER)
        send(wire, tokenize("good"))
        send(wire, tokenize("bad", prompt))
        _, failed = await wire.replies(to_frontend, 2, "bad")
        assert isinstance(failed, Failed)
        assert (failed.code, failed.param, failed.status, failed.retryable) == (code, param, 400, False)
        await wire.wait_for(SUBJECTS.generate(SCHEDULER, "good"))  # the same batch, its own outcome
        assert wire.said(SUBJECTS.generate(SCHEDULER, "bad")) == []


async def test_an_over_long_prompt_is_told_both_numbers() -> None:
    async with running(stage()) as wire:
        send(wire, tokenize("u", TextPrompt("x" * 250)))
        _, failed = await wire.replies(to_frontend, 2, "u")
        assert "250" in failed.message
        assert str(CONTEXT) in failed.message


async def test_one_token_less_than_the_context_fits() -> None:
    async with running(stage()) as wire:
        send(wire, tokenize("u", TextPrompt("x" * (CONTEXT - 1))))
        assert isinstance((await wire.replies(to_frontend, 2, "u"))[1], Tokenized)


async def test_without_a_scheduler_the_owner_gets_the_ids_and_is_told_so() -> None:
    async with running(stage()) as wire:
        await wire.announce(SCHEDULER, StageState.DRAINING)
        send(wire, tokenize("u"))
        _, tokenized = await wire.replies(to_frontend, 2, "u")
        assert tokenized.scheduler is None
        assert wire.said(SUBJECTS.all_of("generate")) == []


async def test_the_least_loaded_scheduler_is_chosen_and_avoided_ones_are_not() -> None:
    busy, idle = SCHEDULER, "scheduler-1-dddddddd"
    async with running(stage()) as wire:
        await wire.announce(busy, requests=9.0)
        await wire.announce(idle, requests=1.0)
        send(wire, tokenize("u"))
        assert (await wire.replies(to_frontend, 2, "u"))[1].scheduler == idle
        message = tokenize("v")
        send(wire, Tokenize("v", 1, FRONTEND, message.prompts, message.params, 7, avoid=(idle,)))
        assert (await wire.replies(to_frontend, 2, "v"))[1].scheduler == busy


async def test_an_abort_that_overtakes_its_request_ends_it() -> None:
    async with running(stage()) as wire:
        await wire.announce(SCHEDULER)
        await wire.abort("u")
        send(wire, tokenize("u"))
        send(wire, tokenize("v"))
        await wire.replies(to_frontend, 2, "v")
        assert wire.said(SUBJECTS.reply(FRONTEND, "u")) == []


async def test_a_request_that_is_aborted_while_it_waits_goes_nowhere(gated: type[NullTokenizer]) -> None:
    async with running(stage(gated)) as wire:
        await wire.announce(SCHEDULER)
        for uid in ("u", "v"):
            send(wire, tokenize(uid))
        await wire.replies(to_frontend, 2)
        assert wire.statistics()["requests"] == 2
        assert set((await wire.ask("probe", {"uids": ["u", "v", "w"]}))["sequences"]) == {"u", "v"}
        await wire.abort("u")
        assert wire.statistics()["requests"] == 1
        Gated.may_encode.set()
        await wire.wait_for(SUBJECTS.generate(SCHEDULER, "v"))
        assert wire.said(SUBJECTS.generate(SCHEDULER, "u")) == []
        assert wire.events("u") == ["aborted"]


async def test_an_abort_of_an_earlier_attempt_leaves_the_later_one(gated: type[NullTokenizer]) -> None:
    async with running(stage(gated)) as wire:
        await wire.announce(SCHEDULER)
        send(wire, tokenize("u", attempt=1))
        send(wire, tokenize("u", attempt=2))
        await wire.abort("u", b"1")
        Gated.may_encode.set()
        (message,) = await wire.wait_for(SUBJECTS.generate(SCHEDULER, "u"))
        assert to_scheduler.decode(message.payload).attempt == 2
        assert [reply.attempt for reply in await wire.replies(to_frontend, 3, "u")] == [1, 2, 2]


async def test_requests_of_a_frontend_that_is_gone_are_dropped(gated: type[NullTokenizer]) -> None:
    async with running(stage(gated)) as wire:
        await wire.announce(SCHEDULER)
        send(wire, tokenize("u"))
        other = "frontend-1-eeeeeeee"
        send(wire, tokenize("v", frontend=other))
        await wire.settle()
        await wire.announce(FRONTEND, StageState.GONE)
        assert wire.statistics()["requests"] == 1
        Gated.may_encode.set()
        await wire.wait_for(SUBJECTS.generate(SCHEDULER, "v"))
        assert wire.said(SUBJECTS.generate(SCHEDULER, "u")) == []


async def test_a_request_in_parts_is_put_together_and_handed_on_in_parts() -> None:
    big = TokenizerStage(NullTokenizer, 10_000, VOCABULARY)
    async with running(big, max_payload_bytes=4096) as wire:
        await wire.announce(SCHEDULER)
        message = tokenize("u", TextPrompt("x" * 9000))
        for piece in split(encode(message), 4096):
            wire.connection.publish(SUBJECTS.tokenize(wire.actor.instance, "u"), piece)
        parts = await wire.wait_for(SUBJECTS.generate(SCHEDULER, "u"), 10)
        assert [part.reply is not None for part in parts] == [False] * (len(parts) - 1) + [True]
        assert wire.events("u") == ["tokenized"]


async def test_texts_are_tokenized_and_put_back_on_request() -> None:
    async with running(stage()) as wire:
        assert await wire.ask("tokenize", {"prompt": "hé"}) == {"token_ids": list("hé".encode())}
        assert await wire.ask("detokenize", {"token_ids": list("hé".encode())}) == {"text": "hé"}
        for question in ({"token_ids": [VOCABULARY]}, {"token_ids": "x"}, {"tokens": [1]}):
            assert (await wire.ask("detokenize", question))["error"]["status"] == 400
        assert (await wire.ask("sing"))["error"]["status"] == 400


async def test_a_tokenizer_that_cannot_be_loaded_ends_the_stage_with_its_reason() -> None:
    def broken() -> Tokenizer:
        raise FileNotFoundError("tokenizer.json")

    with pytest.raises(ExceptionGroup) as raised:
        async with running(TokenizerStage(broken, CONTEXT, VOCABULARY)):
            raise AssertionError("it is ready")
    assert raised.group_contains(FileNotFoundError)
